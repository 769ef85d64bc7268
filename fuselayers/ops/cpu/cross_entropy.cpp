// The cross entropy of rows; cross_entropy/call.py has the formula. The caller has checked the targets.

#include "rows.h"

using namespace fuselayers;

namespace {

// Longer than PIECE, since each piece ends with two reductions: forward of 2048x1024 float32 takes 0.57 ms, with PIECE 0.75.
constexpr int64_t LONG = 1024;

// One logit. Elsewhere rows are read in pieces.
float at(const Rows& logits, int64_t row, int64_t column) {
  float value;
  logits.load(&value, row, column, 1);
  return value;
}

float largest_of(const float* values, int64_t size, float so_far) {
#pragma omp simd reduction(max : so_far)
  for (int64_t i = 0; i < size; ++i) so_far = values[i] > so_far ? values[i] : so_far;
  return so_far;
}

}  // namespace

// logits: [rows, classes]; target: [rows]. losses: [rows]; largest and log_total: [rows], the m and l of the formula.
// A row whose target is ignore_index has the loss 0, and is not read.
extern "C" void cross_entropy_forward(Rows logits, const int64_t* target, int64_t ignore_index, float label_smoothing,
                                      float z_loss, float* losses, float* largest, float* log_total, int64_t rows,
                                      int64_t classes, int threads) {
  parallel(rows, rows * classes, threads, [&](int64_t row) {
    if (target[row] == ignore_index) {
      losses[row] = largest[row] = log_total[row] = 0.0f;
      return;
    }
    // The row is read once. Where a piece has a new largest logit, the sums so far are adjusted to it. `below` is the
    // sum of the differences to it, so a common offset of the logits costs no precision.
    float m = -INFINITY;
    double total = 0.0, below = 0.0;
    for (int64_t column = 0; column < classes; column += LONG) {
      const int64_t size = std::min(LONG, classes - column);
      alignas(64) float buffer[LONG];
      const float* const z = logits.read(buffer, row, column, size);
      const float before = m;
      m = largest_of(z, size, m);
      if (m != before && column) {
        total *= std::exp(static_cast<double>(before) - m);
        below += column * (static_cast<double>(before) - m);
      }
      const float centre = m == -INFINITY ? 0.0f : m;  // so that a difference is not NaN
      if (label_smoothing != 0.0f) below += sum(size, [&](int64_t i) { return z[i] - centre; });
      total += sum(size, [&](int64_t i) { return exponential(z[i] - centre); });
    }
    const auto l = static_cast<float>(std::log(total));
    float loss = l + (1.0f - label_smoothing) * (m - at(logits, row, target[row]));
    if (label_smoothing != 0.0f) loss += label_smoothing * static_cast<float>(-below / classes);
    losses[row] = loss + z_loss * (m + l) * (m + l);
    largest[row] = m;
    log_total[row] = l;
  });
}

// dlosses: [rows], or one number for all rows (stride 0). dlogits: [rows, classes].
extern "C" void cross_entropy_backward(const float* dlosses, int64_t dlosses_stride, Rows logits, const int64_t* target,
                                       const float* largest, const float* log_total, int64_t ignore_index,
                                       float label_smoothing, float z_loss, Rows dlogits, int64_t rows, int64_t classes,
                                       int threads) {
  const float even = label_smoothing / static_cast<float>(classes);
  parallel(rows, rows * classes, threads, [&](int64_t row) {
    const bool ignored = target[row] == ignore_index;
    const float dloss = ignored ? 0.0f : dlosses[row * dlosses_stride], m = largest[row];
    const float share = (1.0f + 2.0f * z_loss * (m + log_total[row])) * std::exp(-log_total[row]);
    for (int64_t column = 0; column < classes; column += PIECE) {
      const int64_t size = std::min(PIECE, classes - column), wanted = target[row] - column;
      alignas(64) float of_z[PIECE], of_dz[PIECE];
      float* const dz = dlogits.place(of_dz, row, column);
      if (ignored) {
        std::fill_n(dz, size, 0.0f);
      } else {
        const float* const z = logits.read(of_z, row, column, size);
#pragma omp simd
        for (int64_t i = 0; i < size; ++i) dz[i] = exponential(z[i] - m) * share - even;
        if (wanted >= 0 && wanted < size) dz[wanted] -= 1.0f - label_smoothing;
#pragma omp simd
        for (int64_t i = 0; i < size; ++i) dz[i] *= dloss;
      }
      dlogits.store(dz, row, column, size);
    }
  });
}
