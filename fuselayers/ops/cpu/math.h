// Elementwise functions in float32, written so that the compiler vectorises the loops around them: no branches, no
// calls. Infinities and NaN give the same results as in torch's formulas.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace fuselayers {

inline float as_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline uint32_t as_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

// exp(x) for x <= 0, and 0 below -87: a power of two and the polynomial of Cephes (Moshier, expf), 2
// units in the last place.
inline float exponential(float x) {
  constexpr float ROUND = 12582912.0f;  // 1.5 * 2^23: adding it rounds to a whole number, which its low bits then hold
  const float shifted = x * 1.44269504f + ROUND, n = shifted - ROUND;
  const float r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  return x < -87.0f ? 0.0f : p * as_float((as_bits(shifted) + 127) << 23);  // 2^n; the shift drops what ROUND adds
}

inline float sigmoid(float x) {
  const float e = exponential(-std::fabs(x));
  return (x < 0.0f ? e : 1.0f) / (1.0f + e);
}

// The standard normal distribution function at z, by the rational approximation of erf in Eigen and XLA: a polynomial of
// x^2 over another one, 2 units in the last place. Beyond 3.832 erf rounds to 1.
inline float normal(float z) {
  const float x = z * 0.70710678f, s = x * x;
  float p = -2.72614225801306e-10f;
  p = p * s + 2.77068142495902e-08f;
  p = p * s + -2.10102402082508e-06f;
  p = p * s + -5.69250639462346e-05f;
  p = p * s + -7.34990630326855e-04f;
  p = p * s + -2.95459980854025e-03f;
  p = p * s + -1.60960333262415e-02f;
  float q = -1.45660718464996e-05f;
  q = q * s + -2.13374055278905e-04f;
  q = q * s + -1.68282697438203e-03f;
  q = q * s + -7.37332916720468e-03f;
  q = q * s + -1.42647390514189e-02f;
  const float erf = x > 3.832f ? 1.0f : x < -3.832f ? -1.0f : x * p / q;
  return 0.5f + 0.5f * erf;
}

inline float normal_density(float z) { return 0.39894228f * exponential(-0.5f * z * z); }

// An activation has `value(z)` and `gradient(z, dy)`, dy times its slope. Where the slope is undefined, it is torch's.

struct Identity {
  static float value(float z) { return z; }
  static float gradient(float, float dy) { return dy; }
};

struct Relu {
  static float value(float z) { return z < 0.0f ? 0.0f : z; }
  static float gradient(float z, float dy) { return z <= 0.0f ? 0.0f : dy; }
};

struct LeakyRelu {
  static float value(float z) { return z > 0.0f ? z : 0.01f * z; }
  static float gradient(float z, float dy) { return z > 0.0f ? dy : 0.01f * dy; }
};

struct Gelu {
  static float value(float z) { return z * normal(z); }
  static float gradient(float z, float dy) { return dy * (normal(z) + z * normal_density(z)); }
};

struct GeluTanh {
  static constexpr float A = 1.5957691216057308f, B = 0.07135481627260025f;  // 1 + tanh(u) is 2 sigmoid(2 u)
  static float value(float z) { return z * sigmoid(z * (A + B * z * z)); }
  static float gradient(float z, float dy) {
    const float e = exponential(-std::fabs(z * (A + B * z * z)));
    const float smaller = e / (1.0f + e), larger = 1.0f / (1.0f + e);  // 1 - sigmoid would cancel
    return dy * ((z >= 0.0f ? larger : smaller) + z * smaller * larger * (A + 3.0f * B * z * z));
  }
};

struct Silu {
  static float value(float z) { return z * sigmoid(z); }
  static float gradient(float z, float dy) {
    const float s = sigmoid(z);
    return dy * (s + z * s * (1.0f - s));
  }
};

struct SquaredRelu {
  static float value(float z) { return Relu::value(z) * Relu::value(z); }
  static float gradient(float z, float dy) { return dy * 2.0f * Relu::value(z); }
};

struct StarRelu {
  static float value(float z) { return 0.8944f * SquaredRelu::value(z) - 0.4472f; }
  static float gradient(float z, float dy) { return dy * 1.7888f * Relu::value(z); }
};

struct Smelu {
  static float value(float z) { return z < -2.0f ? 0.0f : z < 2.0f ? (z + 2.0f) * (z + 2.0f) * 0.125f : z; }
  static float gradient(float z, float dy) { return z >= 2.0f ? dy : z > -2.0f ? dy * (z + 2.0f) * 0.25f : 0.0f * dy; }
};

struct Sigmoid {
  static float value(float z) { return sigmoid(z); }
  static float gradient(float z, float dy) {
    const float s = sigmoid(z);
    return dy * s * (1.0f - s);
  }
};

template <class Function>
void activate(float* z, int64_t size) {
#pragma omp simd
  for (int64_t i = 0; i < size; ++i) z[i] = Function::value(z[i]);
}

template <class Function>
void chain(const float* z, float* dy, int64_t size) {
#pragma omp simd
  for (int64_t i = 0; i < size; ++i) dy[i] = Function::gradient(z[i], dy[i]);
}

template <class Function>
void activate_and_chain(float* z, float* dy, int64_t size) {
#pragma omp simd
  for (int64_t i = 0; i < size; ++i) {
    const float at = z[i];
    dy[i] = Function::gradient(at, dy[i]);
    z[i] = Function::value(at);
  }
}

// The loops of an activation: z becomes its value, dy its gradient, or both at once.
struct Activation {
  const char* name;
  void (*activate)(float* z, int64_t size);
  void (*chain)(const float* z, float* dy, int64_t size);
  void (*activate_and_chain)(float* z, float* dy, int64_t size);
};

template <class Function>
constexpr Activation activation(const char* name) {
  return {name, activate<Function>, chain<Function>, activate_and_chain<Function>};
}

constexpr Activation ACTIVATIONS[] = {
    activation<Identity>("identity"),      activation<Relu>("relu"),
    activation<LeakyRelu>("leaky_relu"),   activation<Gelu>("gelu"),
    activation<GeluTanh>("gelu_tanh"),     activation<Silu>("silu"),
    activation<SquaredRelu>("squared_relu"), activation<StarRelu>("star_relu"),
    activation<Smelu>("smelu"),            activation<Sigmoid>("sigmoid"),
};

// The activation of that name, and the identity for null. The caller has checked the name.
inline const Activation& activation_named(const char* name) {
  for (const Activation& known : ACTIVATIONS)
    if (name && std::strcmp(known.name, name) == 0) return known;
  return ACTIVATIONS[0];
}

}  // namespace fuselayers
