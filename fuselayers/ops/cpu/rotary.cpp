// Rotary position embedding of one tensor of heads.

#include "rows.h"

using namespace fuselayers;

// Heads [B, H, T, C], in any order of the first three dimensions: strides in elements.
struct Heads {
  void* data;
  int64_t batch, head, token;
  int32_t type;
};

// x, y: [B, H, T, C]. cos, sin: [T, pairs] or [B, T, pairs], dense; `tables` is the stride from a sequence to the next, 0
// where all share a table. Pair i is channels (i, i + pairs), or (2 i, 2 i + 1) if interleaved. back: turn by -angle.
extern "C" void rotary(Heads x, Heads y, const float* cos, const float* sin, int64_t tables, int64_t batch, int64_t heads,
                       int64_t tokens, int64_t channels, int64_t pairs, int interleaved, int back, int threads) {
  const float sign = back ? -1.0f : 1.0f;
  parallel(batch * tokens, batch * heads * tokens * channels, threads, [&](int64_t task) {
    const int64_t sequence = task / tokens, token = task % tokens;
    const float* const c = cos + sequence * tables + token * pairs;
    const float* const s = sin + sequence * tables + token * pairs;
    const std::unique_ptr<float[]> buffer(new float[2 * channels]);
    float *const in = buffer.get(), *const out = in + channels;
    const Rows from{x.data, 1, x.type}, to{y.data, 1, y.type};
    for (int64_t head = 0; head < heads; ++head) {
      from.load(in, sequence * x.batch + head * x.head + token * x.token, 0, channels);
      if (interleaved) {
#pragma omp simd
        for (int64_t i = 0; i < pairs; ++i) {
          out[2 * i] = in[2 * i] * c[i] - in[2 * i + 1] * (sign * s[i]);
          out[2 * i + 1] = in[2 * i + 1] * c[i] + in[2 * i] * (sign * s[i]);
        }
      } else {
#pragma omp simd
        for (int64_t i = 0; i < pairs; ++i) {
          out[i] = in[i] * c[i] - in[pairs + i] * (sign * s[i]);
          out[pairs + i] = in[pairs + i] * c[i] + in[i] * (sign * s[i]);
        }
      }
      std::copy(in + 2 * pairs, in + channels, out + 2 * pairs);
      to.store(out, sequence * y.batch + head * y.head + token * y.token, 0, channels);
    }
  });
}
