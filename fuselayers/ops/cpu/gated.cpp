// activation(gate) * up.

#include "rows.h"

using namespace fuselayers;

// gate, up, y: [rows, columns].
extern "C" void gated_forward(Rows gate, Rows up, Rows y, const char* activation, int64_t rows, int64_t columns,
                              int threads) {
  const Activation& function = activation_named(activation);
  parallel(rows, rows * columns, threads, [&](int64_t row) {
    for_pieces(0, columns, [&](int64_t column, int64_t size) {
      alignas(64) float buffer[PIECE], of_up[PIECE];
      float* const out = y.place(buffer, row, column);
      const float* const u = up.read(of_up, row, column, size);
      gate.load(out, row, column, size);
      function.activate(out, size);
#pragma omp simd
      for (int64_t i = 0; i < size; ++i) out[i] *= u[i];
      y.store(out, row, column, size);
    });
  });
}

// dy, gate, up and both gradients: [rows, columns].
extern "C" void gated_backward(Rows dy, Rows gate, Rows up, Rows dgate, Rows dup, const char* activation, int64_t rows,
                               int64_t columns, int threads) {
  const Activation& function = activation_named(activation);
  parallel(rows, rows * columns, threads, [&](int64_t row) {
    for_pieces(0, columns, [&](int64_t column, int64_t size) {
      alignas(64) float of_dy[PIECE], of_up[PIECE], of_dgate[PIECE], of_dup[PIECE];
      const float* const d = dy.read(of_dy, row, column, size);
      const float* const u = up.read(of_up, row, column, size);
      float* const a = dgate.place(of_dgate, row, column);
      float* const b = dup.place(of_dup, row, column);
      gate.load(b, row, column, size);
#pragma omp simd
      for (int64_t i = 0; i < size; ++i) a[i] = d[i] * u[i];
      function.activate_and_chain(b, a, size);
#pragma omp simd
      for (int64_t i = 0; i < size; ++i) b[i] *= d[i];
      dgate.store(a, row, column, size);
      dup.store(b, row, column, size);
    });
  });
}
