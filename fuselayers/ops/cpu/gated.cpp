// activation(gate) * up.

#include "rows.h"

using namespace fuselayers;

// gate, up, y: [rows, columns].
extern "C" void gated_forward(Rows gate, Rows up, Rows y, const char* activation, int64_t rows, int64_t columns,
                              int threads) {
  const Activation& function = activation_named(activation);
  const int64_t pieces = (columns + PIECE - 1) / PIECE;
  parallel(rows * pieces, rows * columns, threads, [&](int64_t task) {
    const int64_t row = task / pieces, column = task % pieces * PIECE, size = std::min(PIECE, columns - column);
    alignas(64) float a[PIECE], b[PIECE];
    gate.load(a, row, column, size);
    up.load(b, row, column, size);
    function.activate(a, size);
#pragma omp simd
    for (int64_t i = 0; i < size; ++i) a[i] *= b[i];
    y.store(a, row, column, size);
  });
}

// dy, gate, up and both gradients: [rows, columns].
extern "C" void gated_backward(Rows dy, Rows gate, Rows up, Rows dgate, Rows dup, const char* activation, int64_t rows,
                               int64_t columns, int threads) {
  const Activation& function = activation_named(activation);
  const int64_t pieces = (columns + PIECE - 1) / PIECE;
  parallel(rows * pieces, rows * columns, threads, [&](int64_t task) {
    const int64_t row = task / pieces, column = task % pieces * PIECE, size = std::min(PIECE, columns - column);
    alignas(64) float a[PIECE], b[PIECE], d[PIECE];
    gate.load(a, row, column, size);
    up.load(b, row, column, size);
    dy.load(d, row, column, size);
#pragma omp simd
    for (int64_t i = 0; i < size; ++i) b[i] *= d[i];
    function.activate_and_chain(a, b, size);
#pragma omp simd
    for (int64_t i = 0; i < size; ++i) a[i] *= d[i];
    dgate.store(b, row, column, size);
    dup.store(a, row, column, size);
  });
}
