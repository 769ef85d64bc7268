// Layer norm and RMS norm after bias, dropout and residual sum; normalise/formula.py has the formula.
//
// A thread holds one row in float32. 16-bit rows have two statistics: y is computed from s before rounding; backward
// reads the rounded s and needs its statistics.

#include "philox.h"

using namespace fuselayers;

namespace {

struct Statistics {
  float mean, rstd;
};

Statistics statistics(const float* s, int64_t size, float eps, bool rms) {
  const auto width = static_cast<float>(size);
  const float mean = rms ? 0.0f : sum(size, [=](int64_t i) { return s[i]; }) / width;
  const float square = sum(size, [=](int64_t i) { return (s[i] - mean) * (s[i] - mean); }) / width;
  return {mean, 1.0f / std::sqrt(square + eps)};
}

}  // namespace

// x, residual, y, s: [rows, columns]; residual and s may be absent. bias, weight, norm_bias: [columns], both biases may be
// null. mean, rstd: [rows], mean is null for an RMS norm. pre: the residual is added after the norm.
extern "C" void norm_forward(Rows x, Rows residual, const float* bias, const float* weight, const float* norm_bias,
                             Rows y, Rows s, float* mean, float* rstd, const int64_t* seed, const int64_t* row_indices,
                             int64_t threshold, float scale, float eps, int pre, int rms, int64_t rows, int64_t columns,
                             int threads) {
  const Mask mask(seed, row_indices, 0, threshold, scale);
  const bool rounds = s && s.type != FLOAT32;
  const int64_t blocks = std::min<int64_t>(rows, 16 * threads);
  parallel(blocks, rows * columns, threads, [&](int64_t block) {
    const std::unique_ptr<float[]> buffer(new float[columns]);
    for (int64_t row = rows * block / blocks; row < rows * (block + 1) / blocks; ++row) {
      float* const sums = s ? s.place(buffer.get(), row, 0) : buffer.get();
      const float* const z = s ? sums : x.read(sums, row, 0, columns);  // without s it is x itself
      if (s) {
        for_pieces(0, columns, [&](int64_t column, int64_t size) {
          load_sum(sums + column, x, bias, row, column, size);
          mask.apply(sums + column, row, column, size);
          if (residual && !pre) residual.add_to(sums + column, row, column, size);
          s.store(sums + column, row, column, size);
        });
      }
      const Statistics own = statistics(z, columns, eps, rms);
      for_pieces(0, columns, [&](int64_t column, int64_t size) {
        alignas(64) float buffer[PIECE];
        float* const out = y.place(buffer, row, column);
#pragma omp simd
        for (int64_t i = 0; i < size; ++i) out[i] = (z[column + i] - own.mean) * own.rstd * weight[column + i];
        if (norm_bias) {
#pragma omp simd
          for (int64_t i = 0; i < size; ++i) out[i] += norm_bias[column + i];
        }
        if (residual && pre) residual.add_to(out, row, column, size);
        y.store(out, row, column, size);
        for (const Rows& next : {x, residual, y, s}) next.fetch(row + 1, column, size);
      });
      if (rounds) s.load(sums, row, 0, columns);
      const Statistics saved = rounds ? statistics(z, columns, eps, rms) : own;
      rstd[row] = saved.rstd;
      if (!rms) mean[row] = saved.mean;
    }
  });
}

// dy, ds, s, dx, dresidual: [rows, columns]; ds and dresidual may be absent. sums: [1 + wants_norm_bias + wants_bias,
// columns], the gradients of weight, norm_bias and bias.
extern "C" void norm_backward(Rows dy, Rows ds, Rows s, const float* weight, const float* mean, const float* rstd,
                              Rows dx, Rows dresidual, float* sums, const int64_t* seed, const int64_t* row_indices,
                              int64_t threshold, float scale, int rms, int wants_norm_bias, int wants_bias, int64_t rows,
                              int64_t columns, int threads) {
  const Mask mask(seed, row_indices, 0, threshold, scale);
  const int64_t num_sums = columns * (1 + wants_norm_bias + wants_bias);
  const RowSums totals(rows, num_sums);
  const auto width = static_cast<float>(columns);
  parallel(totals.blocks(), rows * columns, threads, [&](int64_t block) {
    const std::unique_ptr<float[]> buffer(new float[2 * columns]);
    float *const n = buffer.get(), *const w = n + columns;
    totals.for_rows(block, 0, num_sums, [&](int64_t row, float* dweight) {
      float* const dnorm_bias = wants_norm_bias ? dweight + columns : nullptr;
      float* const dbias = wants_bias ? dweight + columns * (1 + wants_norm_bias) : nullptr;
      const float centre = rms ? 0.0f : mean[row], inverse = rstd[row];
      for_pieces(0, columns, [&](int64_t column, int64_t size) {
        float *const n_piece = n + column, *const w_piece = w + column;
        const float* const s_piece = s.read(n_piece, row, column, size);
        const float* const dy_piece = dy.read(w_piece, row, column, size);
        if (dnorm_bias) {
#pragma omp simd
          for (int64_t i = 0; i < size; ++i) dnorm_bias[column + i] += dy_piece[i];
        }
#pragma omp simd
        for (int64_t i = 0; i < size; ++i) {
          n_piece[i] = (s_piece[i] - centre) * inverse;
          dweight[column + i] += dy_piece[i] * n_piece[i];
          w_piece[i] = dy_piece[i] * weight[column + i];
        }
      });
      const float with_n = sum(columns, [=](int64_t i) { return w[i] * n[i]; }) / width;
      const float alone = rms ? 0.0f : sum(columns, [=](int64_t i) { return w[i]; }) / width;
      for_pieces(0, columns, [&](int64_t column, int64_t size) {
        alignas(64) float buffer[PIECE];
        float* const out = dx.place(buffer, row, column);
#pragma omp simd
        for (int64_t i = 0; i < size; ++i) out[i] = (w[column + i] - n[column + i] * with_n - alone) * inverse;
        if (ds) ds.add_to(out, row, column, size);
        if (dresidual) dresidual.store(out, row, column, size);
        mask.apply(out, row, column, size);
        dx.store(out, row, column, size);
        if (dbias) {
#pragma omp simd
          for (int64_t i = 0; i < size; ++i) dbias[column + i] += out[i];
        }
        for (const Rows& next : {s, dy, ds}) next.fetch(row + 1, column, size);
      });
    });
  });
  totals.add_blocks(sums, threads);
}
