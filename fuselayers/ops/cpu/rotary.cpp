// Rotary position embedding of one tensor of heads.

#include "rows.h"

using namespace fuselayers;

// A task takes a group of heads through a block of tokens, token by token, so that the heads share reads of the tables.
// If the heads of a token are adjacent, a group is all heads; else it is as many as the processor prefetches at a time:
// q and k of 4x8x512x128 float32 take 0.41 ms with 4 heads, 0.62 with 8, and 0.79 head by head (two cores of an AMD
// EPYC).
constexpr int64_t TOKENS = 64, HEADS = 4;

// x, y: [B, H, T, C]. cos, sin: [T, pairs] or [B, T, pairs], dense; `tables` is the stride from one sequence to the
// next, 0 if all share a table. Pair i is channels (i, i + pairs), or (2 i, 2 i + 1) if interleaved. back: rotate by
// -angle.
extern "C" void rotary(Heads x, Heads y, const float* cos, const float* sin, int64_t tables, int64_t batch, int64_t heads,
                       int64_t tokens, int64_t channels, int64_t pairs, int interleaved, int back, int threads) {
  const float sign = back ? -1.0f : 1.0f;
  const int64_t group = x.token > x.head ? std::max(heads, HEADS) : HEADS;
  const int64_t groups = (heads + group - 1) / group, blocks = (tokens + TOKENS - 1) / TOKENS;
  parallel(batch * groups * blocks, batch * heads * tokens * channels, threads, [&](int64_t task) {
    const std::unique_ptr<float[]> buffer(new float[2 * channels]);
    const int64_t sequence = task / (groups * blocks), first_head = task / blocks % groups * group;
    const int64_t first_token = task % blocks * TOKENS, block = std::min(TOKENS, tokens - first_token);
    const int64_t size = std::min(group, heads - first_head);
    for (int64_t index = 0; index < block * size; ++index) {
      const int64_t head = first_head + index % size, token = first_token + index / size;
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
