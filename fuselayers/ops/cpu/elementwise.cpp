// dropout(activation(x + bias)) + residual, of which each op uses a part; and the mask by itself.

#include "philox.h"

using namespace fuselayers;

// The hash of this folder's sources; library.py compares it with the hash of the files.
extern "C" const char* const fuselayers_sources = SOURCES;

namespace {

// Rows are also cut into stretches of columns, so that a wide tensor of few rows has many tasks.
constexpr int64_t STRETCH = 32 * PIECE;

}  // namespace

// x, residual, y: [rows, columns]; residual may be absent. bias: [columns] or null.
extern "C" void elementwise_forward(Rows x, Rows residual, const float* bias, Rows y, const char* activation,
                                    const int64_t* seed, const int64_t* row_indices, int64_t first_column,
                                    int64_t threshold, float scale, int64_t rows, int64_t columns, int threads) {
  const Mask mask(seed, row_indices, first_column, threshold, scale);
  const Activation* const function = activation ? &activation_named(activation) : nullptr;
  const int64_t stretches = (columns + STRETCH - 1) / STRETCH;
  parallel(rows * stretches, rows * columns, threads, [&](int64_t task) {
    const int64_t row = task / stretches, first = task % stretches * STRETCH;
    for_pieces(first, std::min(first + STRETCH, columns), [&](int64_t column, int64_t size) {
      alignas(64) float buffer[PIECE];
      float* const z = y.place(buffer, row, column);
      load_sum(z, x, bias, row, column, size);
      if (function) function->activate(z, size);
      mask.apply(z, row, column, size);
      if (residual) residual.add_to(z, row, column, size);
      y.store(z, row, column, size);
    });
  });
}

// dy, x, dx: [rows, columns]; x may be absent, for the identity. bias: [columns] or null; dbias: [columns], or null if
// it is not needed.
extern "C" void elementwise_backward(Rows dy, Rows x, const float* bias, Rows dx, float* dbias, const char* activation,
                                     const int64_t* seed, const int64_t* row_indices, int64_t first_column,
                                     int64_t threshold, float scale, int64_t rows, int64_t columns, int threads) {
  const Mask mask(seed, row_indices, first_column, threshold, scale);
  const Activation* const function = activation ? &activation_named(activation) : nullptr;
  const RowSums sums(rows, dbias ? columns : 0);
  const int64_t stretches = (columns + STRETCH - 1) / STRETCH;
  parallel(sums.blocks() * stretches, rows * columns, threads, [&](int64_t task) {
    const int64_t block = task / stretches, first = task % stretches * STRETCH;
    const int64_t end = std::min(first + STRETCH, columns);
    sums.for_rows(block, first, end, [&](int64_t row, float* part) {
      for_pieces(first, end, [&](int64_t column, int64_t size) {
        alignas(64) float buffer[PIECE], z[PIECE];
        float* const dz = dx.place(buffer, row, column);
        dy.load(dz, row, column, size);
        mask.apply(dz, row, column, size);
        if (function) {
          load_sum(z, x, bias, row, column, size);
          function->chain(z, dz, size);
        }
        dx.store(dz, row, column, size);
        if (dbias) {
#pragma omp simd
          for (int64_t i = 0; i < size; ++i) part[column - first + i] += dz[i];
        }
      });
    });
  });
  if (dbias) sums.add_blocks(dbias, threads);
}

// keep: [rows, GROUP * groups] bfloat16 ones and zeros, of the groups from `first_group` on.
extern "C" void keep_factors(uint16_t* keep, const int64_t* seed, const int64_t* row_indices, int64_t rows,
                             int64_t first_group, int64_t groups, int64_t threshold, int threads) {
  const Mask mask(seed, row_indices, 0, threshold, 1.0f);
  const int64_t stretches = (groups + PIECE - 1) / PIECE;
  parallel(rows * stretches, rows * groups * GROUP, threads, [&](int64_t task) {
    const int64_t row = task / stretches, first = task % stretches * PIECE;
    mask.fill(keep + GROUP * (row * groups + first), row, first_group + first, std::min(PIECE, groups - first));
  });
}
