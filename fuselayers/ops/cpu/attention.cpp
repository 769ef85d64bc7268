// Attention; attention/call.py has the formula. No tensor of queries x keys is stored, but for a bias's gradient.
//
// A task takes blocks of QUERIES queries through blocks of KEYS keys. The lanes of a vector are queries: a tile of
// scores is [KEYS][QUERIES]. So the maximum and the sum over keys need no step across lanes, the statistics of queries
// are vectors, and a mask needs no shuffle: a lane is a row of the mask, and a word of Philox belongs to two keys of
// that row. k and v are read as they are; only blocks of q and dy are transposed.
//
// Backward computes the weights again, from the logarithm of forward's denominators. A task owns a block of keys, with
// its dk and dv. dq is summed over the keys in `chunks` parts, which follow from the shapes alone, and the parts are
// added in order. So no result depends on the number of threads.

#include "attention.h"

using namespace fuselayers;

namespace {

// The arguments of both functions, as attention/registered.py passes them.
struct Problem {
  Heads q, k, v, bias, mask, padding;  // mask and padding hold bytes; an absent tensor has no data
  const float* sinks;
  const int64_t *documents, *seed;
  int64_t batch, heads, groups, tokens, keys, channels, width;
  int64_t causal, window, first;                                        // window: 0 for none
  int64_t first_row, rows_of_batch, rows_of_head, first_column, threshold;  // of dropout's mask
  float scale, soft_cap, keep_scale;                                    // soft_cap: 0 for none

  int64_t row(int64_t b, int64_t h, int64_t t) const { return first_row + b * rows_of_batch + h * rows_of_head + t; }
};

// A block of queries and a block of keys of one head.
struct Pair {
  int64_t b, h, query, key;
  int queries, keys;
};

// How the rules act on a pair of blocks.
struct Hidden {
  bool all, by_place, by_tensor;  // whether every key is hidden; whether positions, or tensors, hide some
};

bool bytes_hide_all(const Heads& mask, const Pair& pair, bool& some) {
  if (!mask.data) return false;
  uint8_t any = 0, all = 1;
  for (int i = 0; i < (mask.token ? pair.queries : 1); ++i) {
    const uint8_t* const row = mask.bytes(pair.b, pair.h, pair.query + i) + pair.key;
#pragma omp simd reduction(| : any) reduction(& : all)
    for (int j = 0; j < pair.keys; ++j) any |= row[j], all &= row[j];
  }
  some |= !all;
  return !any;
}

Hidden hidden_of(const Problem& P, const Pair& pair) {
  Hidden hidden{true, false, false};
  const int64_t lowest = P.first + pair.query, highest = lowest + pair.queries - 1, last = pair.key + pair.keys - 1;
  if (P.causal) {
    if (pair.key > highest) return hidden;
    hidden.by_place |= last > lowest;
  }
  if (P.window) {
    if (last <= lowest - P.window || (!P.causal && pair.key >= highest + P.window)) return hidden;
    hidden.by_place |= pair.key <= highest - P.window || (!P.causal && last >= lowest + P.window);
  }
  if (bytes_hide_all(P.padding, pair, hidden.by_tensor) || bytes_hide_all(P.mask, pair, hidden.by_tensor)) return hidden;
  if (P.documents) {
    const int64_t* const of = P.documents + pair.b * P.keys;
    const auto [q_low, q_high] = std::minmax_element(of + lowest, of + highest + 1);
    const auto [k_low, k_high] = std::minmax_element(of + pair.key, of + last + 1);
    if (*q_high < *k_low || *k_high < *q_low) return hidden;
    hidden.by_tensor |= *q_low != *q_high || *k_low != *k_high || *q_low != *k_low;
  }
  hidden.all = false;
  return hidden;
}

// Models write masks with the lowest number. In a row of only such scores the logarithm of the sum, which backward reads,
// must keep digits beside them: all lower scores count as this one, below that of float16's lowest number.
constexpr float LOWEST = -0x1p17f;

// Add the bias to a tile of scores, and make the scores -inf that tensors hide. scratch: [QUERIES][KEYS], and a tile.
void add_tensors(const Problem& P, const Pair& pair, float* scores, float* scratch) {
  for (int i = 0; i < pair.queries; ++i) {
    float* const row = scratch + i * KEYS;
    std::fill_n(row, pair.keys, 0.0f);
    if (P.bias.data) {
      P.bias.at(pair.b, pair.h, pair.query + i).load(row, 0, pair.key, pair.keys);
      // A bias like the lowest float32 must not become -inf, which would hide the key.
#pragma omp simd
      for (int j = 0; j < pair.keys; ++j) row[j] = row[j] == -INFINITY ? -INFINITY : std::max(row[j] * LOG2E, -3e38f);
    }
    for (const Heads* mask : {&P.mask, &P.padding}) {
      if (!mask->data) continue;
      const uint8_t* const allowed = mask->bytes(pair.b, pair.h, pair.query + i) + pair.key;
#pragma omp simd
      for (int j = 0; j < pair.keys; ++j) row[j] = allowed[j] ? row[j] : -INFINITY;
    }
    if (P.documents) {
      const int64_t* const of = P.documents + pair.b * P.keys;
      const int64_t own = of[P.first + pair.query + i];
#pragma omp simd
      for (int j = 0; j < pair.keys; ++j) row[j] = of[pair.key + j] == own ? row[j] : -INFINITY;
    }
  }
  float* const tile = scratch + QUERIES * KEYS;
  const Floats lowest = all(P.bias.data ? LOWEST : -INFINITY);
  transpose(scratch, KEYS, pair.queries, pair.keys, tile, 1.0f);
  for (int i = 0; i < pair.keys * QUERIES; i += W) {
    const Floats x = load(tile + i);
    const Floats sum = load(scores + i) + x;
    store(scores + i, x == -INFINITY ? all(-INFINITY) : sum < lowest ? lowest : sum);
  }
}

void hide_places(const Problem& P, const Pair& pair, float* scores) {
  const auto window = static_cast<int32_t>(std::min<int64_t>(P.window, INT32_MAX));
  for (int j = 0; j < pair.keys; ++j)
    for (int v = 0; v < VECTORS; ++v) {
      const Ints gap = lanes() + static_cast<int32_t>(P.first + pair.query + v * W - pair.key - j);
      Floats x = load(scores + j * QUERIES + v * W);
      if (P.causal) x = gap < 0 ? all(-INFINITY) : x;
      if (P.window) x = gap >= window ? all(-INFINITY) : x;
      if (P.window && !P.causal) x = gap <= -window ? all(-INFINITY) : x;
      store(scores + j * QUERIES + v * W, x);
    }
}

// The factor of q before its product with k: tanh takes scores over the cap, and exponentials are powers of two.
float factor(const Problem& P) { return P.soft_cap != 0.0f ? P.scale / P.soft_cap : P.scale * LOG2E; }

// Fill a tile with scores, in powers of two; -inf where hidden. slopes: a tile for those of the cap, or null.
void score(const Problem& P, const Pair& pair, const Hidden& hidden, const Block& k, const float* q_turned, float* scores,
           float* slopes, float* scratch) {
  product<false, 0, 1>(pair.keys, QUERIES, static_cast<int>(P.channels), k.data, k.stride, q_turned, QUERIES, scores, QUERIES);
  if (P.soft_cap != 0.0f)
    for (int i = 0; i < pair.keys * QUERIES; i += W) {
      const Floats t = tanh(load(scores + i));
      store(scores + i, t * (P.soft_cap * LOG2E));
      if (slopes) store(slopes + i, 1.0f - t * t);
    }
  if (P.bias.data || hidden.by_tensor) add_tensors(P, pair, scores, scratch);
  if (hidden.by_place) hide_places(P, pair, scores);
}

// Apply step(key, vector, keep) to the keys and vectors of a tile; keep(x) drops what the mask drops.
template <bool DROPS, class Step>
inline void for_tile(int keys, const TileMask& mask, uint32_t group, Step step) {
  for (int first = 0; first < keys; first += 8)
    for (int v = 0; v < VECTORS; ++v) {
      Words words[4];
      if constexpr (DROPS) mask.words(group + first / 8, v, words);
      const auto at = [&](int j) __attribute__((always_inline)) {
        step(first + j, v, [&](Floats x) __attribute__((always_inline)) {
          if constexpr (DROPS) return keep_if(j % 2 ? words[j / 2] : words[j / 2] << 16, mask.lowest, x);
          else return x;
        });
      };
      if (keys - first >= 8) {
#pragma GCC unroll 8
        for (int j = 0; j < 8; ++j) at(j);
      } else {
        for (int j = 0; j < keys - first; ++j) at(j);
      }
    }
}

// Several blocks of queries of one task share the conversion of k and v.
constexpr int TOGETHER = 4;

void forward_task(const Problem& P, const Heads& y, float* lse, int64_t b, int64_t h, int64_t query, float* buffer) {
  const int64_t g = h / (P.heads / P.groups), channels = padded(P.channels), width = padded(P.width);
  const int64_t count = std::min<int64_t>(TOGETHER, (P.tokens - query + QUERIES - 1) / QUERIES);
  float* const scores = buffer;
  float* const scratch = scores + QUERIES * KEYS;
  float* const k_buffer = scratch + 2 * QUERIES * KEYS;
  float* const v_buffer = k_buffer + KEYS * channels;
  float* const q_turned = v_buffer + KEYS * width;
  float* const sums = q_turned + TOGETHER * QUERIES * channels;
  Floats top[TOGETHER][VECTORS], total[TOGETHER][VECTORS];
  Pair pairs[TOGETHER];
  TileMask masks[TOGETHER];
  for (int i = 0; i < count; ++i) {
    const int64_t first = query + i * QUERIES;
    pairs[i] = {b, h, first, 0, static_cast<int>(std::min<int64_t>(QUERIES, P.tokens - first)), 0};
    const Block q = block(P.q, b, h, first, pairs[i].queries, P.channels, k_buffer);
    transpose(q.data, q.stride, pairs[i].queries, static_cast<int>(P.channels), q_turned + i * QUERIES * channels, factor(P));
    for (int v = 0; v < VECTORS; ++v) top[i][v] = all(-INFINITY), total[i][v] = Floats{};
    if (P.seed) masks[i] = TileMask(*P.seed, P.threshold, P.row(b, h, first));
  }
  std::fill_n(sums, count * QUERIES * width, 0.0f);
  const int64_t lowest = P.first + query, highest = lowest + std::min<int64_t>(TOGETHER * QUERIES, P.tokens - query) - 1;
  const int64_t begin = P.window ? std::clamp<int64_t>(lowest - P.window + 1, 0, P.keys) / KEYS * KEYS : 0;
  const int64_t end = P.causal ? std::min(P.keys, highest + 1) : P.keys;
  for (int64_t key = begin; key < end; key += KEYS) {
    const int keys = static_cast<int>(std::min<int64_t>(KEYS, P.keys - key));
    Block k{}, values{};
    for (int i = 0; i < count; ++i) {
      Pair& pair = pairs[i];
      pair.key = key, pair.keys = keys;
      if (P.causal) pair.keys = static_cast<int>(std::min<int64_t>(keys, P.first + pair.query + pair.queries - key));
      if (pair.keys <= 0) continue;
      const Hidden hidden = hidden_of(P, pair);
      if (hidden.all) continue;
      if (!k.data) {
        k = block(P.k, b, g, key, keys, P.channels, k_buffer);
        values = block(P.v, b, g, key, keys, P.width, v_buffer);
      }
      float* const sum = sums + i * QUERIES * width;
      score(P, pair, hidden, k, q_turned + i * QUERIES * channels, scores, nullptr, scratch);
      Floats now[VECTORS];
      for (int v = 0; v < VECTORS; ++v) now[v] = top[i][v];
      for (int j = 0; j < pair.keys; ++j)
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; ++v) now[v] = larger(now[v], load(scores + j * QUERIES + v * W));
      alignas(64) float shrink[QUERIES];
      Floats centre[VECTORS], added[VECTORS];
      for (int v = 0; v < VECTORS; ++v) {
        centre[v] = now[v] == -INFINITY ? Floats{} : now[v];  // of a row without keys so far
        added[v] = Floats{};
        const Floats x = power_of_2(top[i][v] - centre[v]);
        store(shrink + v * W, x);
        total[i][v] *= x;
        top[i][v] = now[v];
      }
      for (int row = 0; row < pair.queries; ++row)
        if (shrink[row] != 1.0f)
          for (int64_t c = 0; c < width; c += W) store(sum + row * width + c, load(sum + row * width + c) * shrink[row]);
      const auto step = [&](int j, int v, auto keep) __attribute__((always_inline)) {
        const Floats e = power_of_2(load(scores + j * QUERIES + v * W) - centre[v]);
        added[v] += e;
        store(scores + j * QUERIES + v * W, keep(e));
      };
      const auto group = static_cast<uint32_t>((P.first_column + key) / 8);
      if (P.seed) for_tile<true>(pair.keys, masks[i], group, step);
      else for_tile<false>(pair.keys, masks[i], group, step);
      for (int v = 0; v < VECTORS; ++v) total[i][v] += added[v];
      product<true, 1, QUERIES>(pair.queries, static_cast<int>(width), pair.keys, scores, 1, values.data, values.stride, sum, width);
    }
  }
  for (int i = 0; i < count; ++i) {
    alignas(64) float m[QUERIES], l[QUERIES];
    for (int v = 0; v < VECTORS; ++v) store(m + v * W, top[i][v]), store(l + v * W, total[i][v]);
    for (int row = 0; row < pairs[i].queries; ++row) {
      float shrink = 1.0f;
      if (P.sinks) {
        const float sink = P.sinks[h] * LOG2E, larger = std::max({m[row], sink, -3e38f});  // both may be -inf
        shrink = std::exp2(m[row] - larger);
        l[row] = l[row] * shrink + std::exp2(sink - larger);
        m[row] = larger;
      }
      const bool empty = l[row] == 0.0f;
      const float by = empty ? 0.0f : shrink * (P.seed ? P.keep_scale : 1.0f) / l[row];
      float* const sum = sums + (i * QUERIES + row) * width;
      for (int64_t c = 0; c < width; c += W) store(sum + c, load(sum + c) * by);
      const int64_t t = pairs[i].query + row;
      y.at(b, h, t).store(sum, 0, 0, P.width);
      lse[(b * P.heads + h) * P.tokens + t] = empty ? INFINITY : m[row] + std::log2(l[row]);
    }
  }
}

// What backward reads and writes beside the problem.
struct Gradients {
  Heads dy, dq, dk, dv;  // dq: the parts, float32 [chunks * batch, heads, tokens, padded channels]
  const float *lse, *delta;
  float* dbias;  // float32, or null
  int64_t dbias_batch, dbias_head, dbias_token;
};

void add_to_bias(const Gradients& G, const Pair& pair, const float* dscores, float* scratch) {
  float* const tile = scratch;  // [QUERIES][KEYS]
  transpose_back(dscores, pair.keys, tile);
  const int rows = G.dbias_token ? pair.queries : 1;
  for (int i = rows; i < pair.queries; ++i)  // a row of all queries gets the tile's sum, as in `product`
#pragma omp simd
    for (int j = 0; j < pair.keys; ++j) tile[j] += tile[i * KEYS + j];
  for (int i = 0; i < rows; ++i) {
    float* const to = G.dbias + pair.b * G.dbias_batch + pair.h * G.dbias_head + (pair.query + i) * G.dbias_token + pair.key;
#pragma omp simd
    for (int j = 0; j < pair.keys; ++j) to[j] += tile[i * KEYS + j];
  }
}

// Add the gradients of a pair of blocks: to dk and dv, [KEYS] rows each, and to dq, [queries] rows.
void backward_pair(const Problem& P, const Gradients& G, const Pair& pair, const Hidden& hidden, const Block& k,
                   const Block& values, float* dk, float* dv, float* dq, float* buffer) {
  const int64_t channels = padded(P.channels), width = padded(P.width);
  const int rows = pair.queries, keys = pair.keys;
  float* const scores = buffer;
  float* const dscores = scores + QUERIES * KEYS;
  float* const slopes = dscores + QUERIES * KEYS;
  float* const scratch = slopes + QUERIES * KEYS;
  float* const q_buffer = scratch + 2 * QUERIES * KEYS;
  float* const dy_buffer = q_buffer + QUERIES * channels;
  float* const q_turned = dy_buffer + QUERIES * width;
  float* const dy_turned = q_turned + QUERIES * channels;
  const Block q = block(P.q, pair.b, pair.h, pair.query, rows, P.channels, q_buffer);
  const Block dy = block(G.dy, pair.b, pair.h, pair.query, rows, P.width, dy_buffer);
  transpose(q.data, q.stride, rows, static_cast<int>(P.channels), q_turned, factor(P));
  transpose(dy.data, dy.stride, rows, static_cast<int>(P.width), dy_turned, 1.0f);
  score(P, pair, hidden, k, q_turned, scores, P.soft_cap != 0.0f ? slopes : nullptr, scratch);
  product<false, 0, 1>(keys, QUERIES, static_cast<int>(P.width), values.data, values.stride, dy_turned, QUERIES, dscores, QUERIES);
  // With e = weight * keep_scale the gradient of a score is e * ((keep ? dy v : 0) - delta / keep_scale).
  const float keep_scale = P.seed ? P.keep_scale : 1.0f, shift = std::log2(keep_scale), keep_share = 1.0f / keep_scale;
  alignas(64) float l[QUERIES], d[QUERIES];
  const int64_t place = (pair.b * P.heads + pair.h) * P.tokens + pair.query;
  for (int i = 0; i < QUERIES; ++i) {
    l[i] = i < rows ? G.lse[place + i] - shift : INFINITY;
    d[i] = i < rows ? G.delta[place + i] * keep_share : 0.0f;
  }
  const bool scaled_later = G.dbias || P.soft_cap != 0.0f;
  const float scale = scaled_later ? 1.0f : P.scale;
  const auto step = [&](int j, int v, auto keep) __attribute__((always_inline)) {
    float *const s = scores + j * QUERIES + v * W, *const ds = dscores + j * QUERIES + v * W;
    const Floats e = power_of_2(load(s) - load(l + v * W));
    store(s, keep(e));
    store(ds, e * (keep(load(ds)) - load(d + v * W)) * scale);
  };
  const auto group = static_cast<uint32_t>((P.first_column + pair.key) / 8);
  if (P.seed) for_tile<true>(keys, TileMask(*P.seed, P.threshold, P.row(pair.b, pair.h, pair.query)), group, step);
  else for_tile<false>(keys, TileMask(), group, step);
  if (G.dbias) add_to_bias(G, pair, dscores, scratch);
  if (scaled_later)
    for (int i = 0; i < keys * QUERIES; i += W)
      store(dscores + i, load(dscores + i) * P.scale * (P.soft_cap != 0.0f ? load(slopes + i) : all(1.0f)));
  product<true, QUERIES, 1>(keys, static_cast<int>(width), rows, scores, QUERIES, dy.data, dy.stride, dv, width);
  product<true, QUERIES, 1>(keys, static_cast<int>(channels), rows, dscores, QUERIES, q.data, q.stride, dk, channels);
  product<true, 1, QUERIES>(rows, static_cast<int>(channels), keys, dscores, 1, k.data, k.stride, dq, G.dq.token);
}

// The keys of a chunk, for one key-value head of one sequence. part: the index of the chunk in dq.
void backward_task(const Problem& P, const Gradients& G, int64_t b, int64_t g, int64_t chunk, int64_t chunks, float* buffer) {
  const int64_t channels = padded(P.channels), width = padded(P.width), repeats = P.heads / P.groups;
  const int64_t blocks = (P.keys + KEYS - 1) / KEYS;
  float* const k_buffer = buffer;
  float* const v_buffer = k_buffer + KEYS * channels;
  float* const dk = v_buffer + KEYS * width;
  float* const dv = dk + KEYS * channels;
  float* const rest = dv + KEYS * width;
  const auto dq_at = [&](int64_t h, int64_t t) {
    return static_cast<float*>(G.dq.at(chunk * P.batch + b, h, t).data);
  };
  for (int64_t h = g * repeats; h < (g + 1) * repeats; ++h)
    for (int64_t t = 0; t < P.tokens; ++t) std::fill_n(dq_at(h, t), channels, 0.0f);
  for (int64_t key = chunk * blocks / chunks * KEYS; key < std::min(P.keys, (chunk + 1) * blocks / chunks * KEYS); key += KEYS) {
    const int keys = static_cast<int>(std::min<int64_t>(KEYS, P.keys - key));
    const Block k = block(P.k, b, g, key, keys, P.channels, k_buffer), values = block(P.v, b, g, key, keys, P.width, v_buffer);
    std::fill_n(dk, keys * channels, 0.0f);
    std::fill_n(dv, keys * width, 0.0f);
    // The queries that look at one of these keys, by position.
    const int64_t lowest = P.causal ? key - P.first : P.window ? key - P.first - P.window + 1 : 0;
    const int64_t end = P.window ? std::clamp<int64_t>(key + keys - 1 + P.window - P.first, 0, P.tokens) : P.tokens;
    for (int64_t h = g * repeats; h < (g + 1) * repeats; ++h)
      for (int64_t query = std::max<int64_t>(lowest, 0) / QUERIES * QUERIES; query < end; query += QUERIES) {
        Pair pair{b, h, query, key, static_cast<int>(std::min<int64_t>(QUERIES, P.tokens - query)), keys};
        if (P.causal) pair.keys = static_cast<int>(std::min<int64_t>(keys, P.first + query + pair.queries - key));
        if (pair.keys <= 0) continue;
        const Hidden hidden = hidden_of(P, pair);
        if (!hidden.all) backward_pair(P, G, pair, hidden, k, values, dk, dv, dq_at(h, query), rest);
      }
    for (int j = 0; j < keys; ++j) {
      G.dk.at(b, g, key + j).store(dk + j * channels, 0, 0, P.channels);
      G.dv.at(b, g, key + j).store(dv + j * width, 0, 0, P.width);
    }
  }
}

// Run task(index, buffer) for 0 .. tasks - 1, each thread with a buffer of `size` floats; the first tasks begin first.
template <class Task>
void with_buffers(int64_t tasks, int64_t size, int threads, Task task) {
#pragma omp parallel num_threads(threads) if (threads > 1 && tasks > 1)
  {
    const Buffer buffer(size);
#pragma omp for schedule(dynamic)
    for (int64_t index = 0; index < tasks; ++index) task(index, buffer.data);
  }
}

}  // namespace

// lse: [batch, heads, tokens], the base-2 logarithm of a query's denominator, inf if it looks at no key.
extern "C" void attention_forward(const Problem* problem, Heads y, float* lse, int threads) {
  const Problem& P = *problem;
  const int64_t blocks = (P.tokens + TOGETHER * QUERIES - 1) / (TOGETHER * QUERIES), tasks = P.batch * P.heads * blocks;
  const int64_t channels = padded(P.channels), width = padded(P.width);
  const int64_t size = 3 * QUERIES * KEYS + (KEYS + TOGETHER * QUERIES) * (channels + width);
  with_buffers(tasks, size, threads, [&](int64_t task, float* buffer) {
    const int64_t head = task / blocks, last = blocks - 1 - task % blocks;  // the longest rows of a causal call first
    forward_task(P, y, lse, head / P.heads, head % P.heads, last * TOGETHER * QUERIES, buffer);
  });
}

// delta: [batch, heads, tokens], which becomes dy times y. parts: the sums of dq over each chunk of keys, float32
// [chunks * batch, heads, tokens, padded channels]; dq itself where it has that form. dbias: float32, zeros,
// or no data; of distances, [chunks * batch, heads, tokens + keys - 1], since the chunks of a head add to the same ones.
extern "C" void attention_backward(const Problem* problem, Heads dy, Heads y, const float* lse, float* delta, Heads parts,
                                   Heads dq, Heads dk, Heads dv, Heads dbias, int64_t chunks, int threads) {
  const Problem& P = *problem;
  const int64_t heads = P.batch * P.heads, channels = padded(P.channels), width = padded(P.width);
  with_buffers(heads, 2 * width, threads, [&](int64_t head, float* buffer) {
    const int64_t b = head / P.heads, h = head % P.heads;
    for (int64_t t = 0; t < P.tokens; ++t) {
      const float* const a = dy.at(b, h, t).read(buffer, 0, 0, P.width);
      const float* const c = y.at(b, h, t).read(buffer + width, 0, 0, P.width);
      float total = 0.0f;
#pragma omp simd reduction(+ : total)
      for (int64_t i = 0; i < P.width; ++i) total += a[i] * c[i];
      delta[head * P.tokens + t] = total;
    }
  });
  const Gradients G{dy, parts, dk, dv, lse, delta, static_cast<float*>(dbias.data), dbias.batch, dbias.head, dbias.token};
  // One task adds all heads and sequences that share a bias.
  const bool one_batch = dbias.data && !dbias.batch, one_head = dbias.data && !dbias.head;
  const int64_t batches = one_batch ? 1 : P.batch, groups = one_head ? 1 : P.groups;
  const int64_t size = (2 * KEYS + 2 * QUERIES) * (channels + width) + 5 * QUERIES * KEYS;
  with_buffers(chunks * batches * groups, size, threads, [&](int64_t task, float* buffer) {
    const int64_t chunk = task / (batches * groups), own_b = task / groups % batches, own_g = task % groups;
    Gradients own = G;
    if (dbias.token < 0) own.dbias += chunk * P.batch * dbias.batch;
    for (int64_t b = one_batch ? 0 : own_b; b < (one_batch ? P.batch : own_b + 1); ++b)
      for (int64_t g = one_head ? 0 : own_g; g < (one_head ? P.groups : own_g + 1); ++g)
        backward_task(P, own, b, g, chunk, chunks, buffer);
  });
  if (parts.data == dq.data) return;
  with_buffers(heads, channels, threads, [&](int64_t head, float* sum) {
    for (int64_t t = 0; t < P.tokens; ++t) {
      for (int64_t chunk = 0; chunk < chunks; ++chunk) {
        const auto* const part = static_cast<float*>(parts.at(chunk * P.batch + head / P.heads, head % P.heads, t).data);
#pragma omp simd
        for (int64_t c = 0; c < channels; ++c) sum[c] = chunk ? sum[c] + part[c] : part[c];
      }
      dq.at(head / P.heads, head % P.heads, t).store(sum, 0, 0, P.channels);
    }
  });
}
