// The parts of attention.cpp: vectors of floats, products of small matrices, transposes, blocks of heads, and dropout's
// mask for a tile of scores.

#pragma once

#include <algorithm>
#include <cmath>
#include <new>

#include "philox.h"
#include "rows.h"

namespace fuselayers {

#if defined(CPU_CAPABILITY_AVX512)
constexpr int W = 16, TILE_ROWS = 8;  // floats of a vector, rows of a product in registers
#elif defined(CPU_CAPABILITY_AVX2)
constexpr int W = 8, TILE_ROWS = 6;
#else
constexpr int W = 4, TILE_ROWS = 4;
#endif
constexpr int QUERIES = 32, VECTORS = QUERIES / W, KEYS = 128;
constexpr float LOG2E = 1.44269504f;

typedef float Floats __attribute__((vector_size(W * 4)));
typedef int32_t Ints __attribute__((vector_size(W * 4)));
typedef uint32_t Words __attribute__((vector_size(W * 4)));
typedef float Unaligned __attribute__((vector_size(W * 4), aligned(4), may_alias));

inline Floats load(const float* from) { return *reinterpret_cast<const Unaligned*>(from); }
inline void store(float* to, Floats x) { *reinterpret_cast<Unaligned*>(to) = x; }
inline Floats all(float x) { return x - Floats{}; }
inline Floats larger(Floats a, Floats b) { return a > b ? a : b; }
inline Ints lanes() {
  Ints x;
  for (int i = 0; i < W; ++i) x[i] = i;
  return x;
}

// 2^x for x up to 127, and 0 below -126. The polynomial is the best one of degree 5 on [-1/2, 1/2].
inline Floats power_of_2(Floats x) {
  constexpr float ROUND = 12582912.0f;  // see `exponential`
  const Floats shifted = x + ROUND, r = x - (shifted - ROUND);
  Floats p = r * 1.32647271e-3f + 9.67151286e-3f;
  p = p * r + 5.55073375e-2f;
  p = p * r + 2.40222421e-1f;
  p = p * r + 6.93146978e-1f;
  p = p * r + 1.0f;
  return x < -126.0f ? Floats{} : p * reinterpret_cast<Floats>((reinterpret_cast<Ints>(shifted) + 127) << 23);
}

// Near 0 the polynomial of Cephes (Moshier, tanhf), since a difference of exponentials would cancel.
inline Floats tanh(Floats x) {
  const Floats size = reinterpret_cast<Floats>(reinterpret_cast<Ints>(x) & 0x7FFFFFFF), square = x * x;
  Floats p = square * -5.70498872745e-3f + 2.06390887954e-2f;
  p = p * square - 5.37397155531e-2f;
  p = p * square + 1.33314422036e-1f;
  p = p * square - 3.33332819422e-1f;
  const Floats e = power_of_2(size * (-2.0f * LOG2E)), far = (1.0f - e) / (1.0f + e);
  return size < 0.625f ? x + x * square * p : x < 0.0f ? -far : far;
}

// ---- c[rows, columns] (+)= a[rows, depth] b[depth, columns] ----
// a(row, k) is a[row * ROW + k * STEP]; for ROW = 0 its rows are a_stride apart. Columns are multiples of W. c is added
// last: one float32 sum over thousands of queries or keys, instead of one of each block, has ten times the error.

template <int R, int N, bool ADD, int ROW, int STEP>
__attribute__((always_inline)) inline void product_tile(int depth, const float* a, int64_t a_stride, const float* b,
                                                        int64_t b_stride, float* c, int64_t c_stride) {
  Floats sums[R][N];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
    for (int n = 0; n < N; ++n) sums[r][n] = Floats{};
  const int64_t stride = ROW ? ROW : a_stride;
#pragma GCC unroll 2
  for (int k = 0; k < depth; ++k, a += STEP, b += b_stride) {
    Floats row[N];
#pragma GCC unroll 2
    for (int n = 0; n < N; ++n) row[n] = load(b + n * W);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const Floats x = all(a[r * stride]);
#pragma GCC unroll 2
      for (int n = 0; n < N; ++n) sums[r][n] += x * row[n];
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
    for (int n = 0; n < N; ++n) {
      float* const to = c + r * c_stride + n * W;
      store(to, ADD ? load(to) + sums[r][n] : sums[r][n]);
    }
}

template <int R, int N, bool ADD, int ROW, int STEP>
void product_columns(int rows, int depth, const float* a, int64_t a_stride, const float* b, int64_t b_stride, float* c,
                     int64_t c_stride) {
  for (; rows >= R; rows -= R, a += R * (ROW ? ROW : a_stride), c += R * c_stride)
    product_tile<R, N, ADD, ROW, STEP>(depth, a, a_stride, b, b_stride, c, c_stride);
  if constexpr (R > 1)
    if (rows) product_columns<R / 2, N, ADD, ROW, STEP>(rows, depth, a, a_stride, b, b_stride, c, c_stride);
}

template <bool ADD, int ROW, int STEP>
void product(int rows, int columns, int depth, const float* a, int64_t a_stride, const float* b, int64_t b_stride, float* c,
             int64_t c_stride) {
  for (; columns >= 2 * W; columns -= 2 * W, b += 2 * W, c += 2 * W)
    product_columns<TILE_ROWS, 2, ADD, ROW, STEP>(rows, depth, a, a_stride, b, b_stride, c, c_stride);
  for (; columns > 0; columns -= W, b += W, c += W)
    product_columns<TILE_ROWS, 1, ADD, ROW, STEP>(rows, depth, a, a_stride, b, b_stride, c, c_stride);
}

// ---- transposes ----

inline void transpose_8x8(const float* from, int64_t stride, float* to, int64_t to_stride, float factor) {
#if defined(CPU_CAPABILITY_AVX512) || defined(CPU_CAPABILITY_AVX2)
  __m256 r[8], t[8];
  for (int i = 0; i < 8; ++i) r[i] = _mm256_mul_ps(_mm256_loadu_ps(from + i * stride), _mm256_set1_ps(factor));
  for (int i = 0; i < 8; i += 2) t[i] = _mm256_unpacklo_ps(r[i], r[i + 1]), t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
  for (int i = 0; i < 8; i += 4)
    for (int j = 0; j < 2; ++j) {
      r[i + 2 * j] = _mm256_shuffle_ps(t[i + j], t[i + j + 2], 0x44);
      r[i + 2 * j + 1] = _mm256_shuffle_ps(t[i + j], t[i + j + 2], 0xEE);
    }
  for (int i = 0; i < 4; ++i) {
    _mm256_storeu_ps(to + i * to_stride, _mm256_permute2f128_ps(r[i], r[i + 4], 0x20));
    _mm256_storeu_ps(to + (i + 4) * to_stride, _mm256_permute2f128_ps(r[i], r[i + 4], 0x31));
  }
#else
  for (int i = 0; i < 8; ++i)
    for (int j = 0; j < 8; ++j) to[j * to_stride + i] = factor * from[i * stride + j];
#endif
}

// to[column * QUERIES + row] = factor * from[row * stride + column], and 0 in the rows that a block lacks.
inline void transpose(const float* from, int64_t stride, int rows, int columns, float* to, float factor) {
  const int whole_rows = rows & ~7, whole_columns = columns & ~7;
  for (int row = 0; row < whole_rows; row += 8)
    for (int column = 0; column < whole_columns; column += 8)
      transpose_8x8(from + row * stride + column, stride, to + column * QUERIES + row, QUERIES, factor);
  for (int column = 0; column < columns; ++column) {
    for (int row = column < whole_columns ? whole_rows : 0; row < rows; ++row)
      to[column * QUERIES + row] = factor * from[row * stride + column];
    for (int row = rows; row < QUERIES; ++row) to[column * QUERIES + row] = 0.0f;
  }
}

// to[row * KEYS + column] = from[column * QUERIES + row]
inline void transpose_back(const float* from, int columns, float* to) {
  for (int column = 0; column < columns; column += 8)  // a tile has KEYS columns, so the last ones may be read
    for (int row = 0; row < QUERIES; row += 8)
      transpose_8x8(from + column * QUERIES + row, QUERIES, to + row * KEYS + column, KEYS, 1.0f);
}

// ---- blocks of heads ----

inline int64_t padded(int64_t columns) { return (columns + 15) / 16 * 16; }

struct Buffer {
  float* const data;
  explicit Buffer(int64_t size) : data(static_cast<float*>(::operator new(size * 4, std::align_val_t(64)))) {}
  ~Buffer() { ::operator delete(data, std::align_val_t(64)); }
  Buffer(const Buffer&) = delete;
};

// Rows of a head in float32, whose columns products may read up to padded(columns).
struct Block {
  const float* data;
  int64_t stride;
};

// In place, or converted and padded with zeros into the buffer.
inline Block block(const Heads& x, int64_t b, int64_t h, int64_t first, int64_t rows, int64_t columns, float* buffer) {
  const int64_t width = padded(columns);
  if (x.type == FLOAT32 && columns == width) return {static_cast<const float*>(x.at(b, h, first).data), x.token};
  for (int64_t row = 0; row < rows; ++row) {
    x.at(b, h, first + row).load(buffer + row * width, 0, 0, columns);
    std::fill(buffer + row * width + columns, buffer + (row + 1) * width, 0.0f);
  }
  return {buffer, width};
}

// ---- the mask of a tile: lanes are rows ----

// Vectors of 64-bit lanes whose low halves make a vector of words: even and odd lanes, or one lane each.
constexpr int PARTS = W / WIDTH;

#if defined(CPU_CAPABILITY_AVX512)
inline Vector spread(uint32_t first) { return _mm512_add_epi32(count_up(first), count_up(0)); }  // first, first + 2, ...
inline Words join(const Vector (&x)[PARTS]) {
  return reinterpret_cast<Words>(_mm512_mask_blend_epi32(0xAAAA, x[0], _mm512_slli_epi64(x[1], 32)));
}
#elif defined(CPU_CAPABILITY_AVX2)
inline Vector spread(uint32_t first) { return _mm256_add_epi32(count_up(first), count_up(0)); }
inline Words join(const Vector (&x)[PARTS]) {
  return reinterpret_cast<Words>(_mm256_blend_epi32(x[0], _mm256_slli_epi64(x[1], 32), 0xAA));
}
#else
inline Vector spread(uint32_t first) { return first; }
inline Words join(const Vector (&x)[PARTS]) {
  Words joined;
  for (int part = 0; part < PARTS; ++part) joined[part] = static_cast<uint32_t>(x[part]);
  return joined;
}
#endif

inline Floats keep_if(Words word, uint32_t lowest, Floats x) { return word >= lowest ? x : Floats{}; }

// The mask of QUERIES rows. Its counter is (group of keys, row, 0, 0). So in the first round only the group is
// multiplied, in the second one factor is the group's and the other the row's, and in the third one is the group's:
// these products are scalars, or made once for all keys.
class TileMask {
 public:
  uint32_t lowest;

  TileMask() = default;
  TileMask(int64_t seed, int64_t threshold, int64_t first_row) : lowest(static_cast<uint32_t>(threshold) << 16) {
    for (uint32_t round = 0; round < 10; ++round) {
      keys_[round][0] = static_cast<uint32_t>(seed) + round * 0x9E3779B9;
      keys_[round][1] = static_cast<uint32_t>(static_cast<uint64_t>(seed) >> 32) + round * 0xBB67AE85;
    }
    for (int v = 0; v < VECTORS; ++v)
      for (int part = 0; part < PARTS; ++part) {
        const Vector row = spread(static_cast<uint32_t>(first_row + v * W + part));
        of_rows_[v][part] = multiply(exclusive_or(row, all(keys_[0][0]), all(0u)), all(M0));
      }
  }

  // The words of the rows of vector v and eight keys: half j % 2 of words[j / 2], low half first, is the number of key j.
  __attribute__((always_inline)) inline void words(uint32_t group, int v, Words* out) const {
    const uint64_t first = group * M0L, second = ((first >> 32) ^ keys_[0][1]) * M1L;
    const uint64_t third = static_cast<uint32_t>((second >> 32) ^ keys_[1][0]) * M0L;
    Vector c[4][PARTS];
#pragma GCC unroll 4
    for (int part = 0; part < PARTS; ++part) {
      const Vector row = of_rows_[v][part];
      const Vector product = multiply(exclusive_or(high_half(row), low(first), all(keys_[1][1])), all(M1));
      Vector c0 = exclusive_or(high_half(product), low(second), all(keys_[2][0])), c1 = product;
      Vector c2 = exclusive_or(low(third >> 32), row, all(keys_[2][1])), c3 = low(third);
#pragma GCC unroll 8
      for (int round = 3; round < 10; ++round) {
        const Vector product0 = multiply(c0, all(M0)), product1 = multiply(c2, all(M1));
        c0 = exclusive_or(high_half(product1), c1, all(keys_[round][0]));
        c2 = exclusive_or(high_half(product0), c3, all(keys_[round][1]));
        c1 = product1;
        c3 = product0;
      }
      c[0][part] = c0, c[1][part] = c1, c[2][part] = c2, c[3][part] = c3;
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) out[i] = join(c[i]);
  }

 private:
  static constexpr uint32_t M0 = 0xD2511F53, M1 = 0xCD9E8D57;
  static constexpr uint64_t M0L = M0, M1L = M1;
  static Vector low(uint64_t x) { return all(static_cast<uint32_t>(x)); }

  uint32_t keys_[10][2];
  Vector of_rows_[VECTORS][PARTS];
};

}  // namespace fuselayers
