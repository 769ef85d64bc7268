// Rotary position embedding of one tensor of heads.

#include "rows.h"

using namespace fuselayers;

// Heads [B, H, T, C], in any order of the first three dimensions: strides in elements.
struct Heads {
  void* data;
  int64_t batch, head, token;
  int32_t type;

  // The channels of a head, as a row.
  Rows at(int64_t sequence, int64_t index, int64_t place) const {
    const int64_t width = type == FLOAT32 ? 4 : 2;
    return {static_cast<char*>(data) + width * (sequence * batch + index * head + place * token), 0, type};
  }
};

// x, y: [B, H, T, C]. cos, sin: [T, pairs] or [B, T, pairs], dense; `tables` is the stride from a sequence to the next, 0
// where all share a table. Pair i is channels (i, i + pairs), or (2 i, 2 i + 1) if interleaved. back: turn by -angle.
extern "C" void rotary(Heads x, Heads y, const float* cos, const float* sin, int64_t tables, int64_t batch, int64_t heads,
                       int64_t tokens, int64_t channels, int64_t pairs, int interleaved, int back, int threads) {
  const float sign = back ? -1.0f : 1.0f;
  const bool token_major = x.token > x.head;  // as memory is read
  const int64_t outer = token_major ? tokens : heads, inner = token_major ? heads : tokens;
  parallel(batch * outer, batch * heads * tokens * channels, threads, [&](int64_t task) {
    const std::unique_ptr<float[]> buffer(new float[2 * channels]);
    const int64_t sequence = task / outer;
    for (int64_t index = 0; index < inner; ++index) {
      const int64_t head = token_major ? index : task % outer, token = token_major ? task % outer : index;
      const float* const c = cos + sequence * tables + token * pairs;
      const float* const s = sin + sequence * tables + token * pairs;
      const Rows from = x.at(sequence, head, token), to = y.at(sequence, head, token);
      const float* const in = from.read(buffer.get(), 0, 0, channels);
      float* const out = to.place(buffer.get() + channels, 0, 0);
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
      to.store(out, 0, 0, channels);
    }
  });
}
