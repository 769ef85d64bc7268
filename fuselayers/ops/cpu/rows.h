// Tensors as rows, read and written in float32 pieces that stay in the first cache; and the loops over rows.
//
// A kernel takes a piece through its steps one after the other: load, add, activate, drop, store. Each step is a loop
// that the compiler vectorises, and the type of a tensor is checked once per piece. A piece is small, so that the
// processor fetches the next piece meanwhile: with 512 columns gelu and dropout of 2048x1024 float32 take 1.16 ms
// forward and 2.01 backward, with 128 they take 1.01 and 1.31 (two cores of an AMD EPYC, AVX-512).

#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "math.h"

namespace fuselayers {

constexpr int64_t PIECE = 128;
// Elements from which threads help. Starting them takes about 5 us.
constexpr int64_t PARALLEL_FROM = 16384;

enum Type : int32_t { FLOAT32, BFLOAT16, FLOAT16 };

// bfloat16 is the upper half of a float32. Rounds to nearest, ties to even.
inline float from_bfloat16(uint16_t bits) { return as_float(static_cast<uint32_t>(bits) << 16); }
inline uint16_t to_bfloat16(float value) {
  const uint32_t bits = as_bits(value), rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
  return static_cast<uint16_t>((bits & 0x7FFFFFFF) > 0x7F800000 ? 0x7FC0 : rounded);
}

// float16 has a narrower exponent. Its subnormal numbers are multiples of 2^-24, the last bit of 0.5. No float32 on the
// way is subnormal, since torch.set_flush_denormal would make it 0.
inline float from_float16(uint16_t bits) {
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000) << 16, rest = bits & 0x7FFF;
  const uint32_t normal = (rest << 13) + (112u << 23);
  const uint32_t small = as_bits(as_float(rest | 126u << 23) - 0.5f);
  return as_float(sign | (rest >= 0x7C00 ? rest << 13 | 0x7F800000 : rest < 0x0400 ? small : normal));
}
inline uint16_t to_float16(float value) {
  const uint32_t bits = as_bits(value), sign = bits >> 16 & 0x8000, rest = bits & 0x7FFFFFFF;
  const uint32_t normal = (rest - (112u << 23) + 0xFFF + (rest >> 13 & 1)) >> 13;
  const uint32_t small = as_bits(as_float(rest) + 0.5f) - as_bits(0.5f);  // the sum rounds to multiples of 2^-24
  const uint32_t large = rest > 0x7F800000 ? 0x7E00 : 0x7C00;
  return static_cast<uint16_t>(sign | (rest >= 143u << 23 ? large : rest < 113u << 23 ? small : std::min(normal, 0x7C00u)));
}

// A tensor [rows, columns] with adjacent columns. A null pointer is an absent tensor.
struct Rows {
  void* data;
  int64_t stride;  // elements from one row to the next
  int32_t type;

  explicit operator bool() const { return data != nullptr; }

  // Prefetch the elements that a later `load` reads.
  void fetch(int64_t row, int64_t column, int64_t size) const {
    if (!data) return;
    const int64_t width = type == FLOAT32 ? 4 : 2;
    const char* const from = static_cast<const char*>(data) + (row * stride + column) * width;
    for (int64_t byte = 0; byte < size * width; byte += 64) __builtin_prefetch(from + byte);
  }
  // Return `size` elements from (row, column) on: in place, or converted into the buffer.
  const float* read(float* buffer, int64_t row, int64_t column, int64_t size) const {
    if (type == FLOAT32) return at<float>(row, column);
    load(buffer, row, column, size);
    return buffer;
  }
  void load(float* out, int64_t row, int64_t column, int64_t size) const {
    if (type == FLOAT32) std::copy_n(at<float>(row, column), size, out);
    else if (type == BFLOAT16) each(at<uint16_t>(row, column), size, [=](int64_t i, uint16_t x) { out[i] = from_bfloat16(x); });
    else each(at<uint16_t>(row, column), size, [=](int64_t i, uint16_t x) { out[i] = from_float16(x); });
  }
  void add_to(float* out, int64_t row, int64_t column, int64_t size) const {
    float buffer[PIECE];
    const float* const values = read(buffer, row, column, size);
#pragma omp simd
    for (int64_t i = 0; i < size; ++i) out[i] += values[i];
  }
  // Return where to write a piece: in place, or into the buffer, from which `store` then converts it.
  float* place(float* buffer, int64_t row, int64_t column) const {
    return type == FLOAT32 ? at<float>(row, column) : buffer;
  }
  void store(const float* values, int64_t row, int64_t column, int64_t size) const {
    uint16_t* const to = at<uint16_t>(row, column);
    if (type == BFLOAT16) each(values, size, [=](int64_t i, float x) { to[i] = to_bfloat16(x); });
    else if (type == FLOAT16) each(values, size, [=](int64_t i, float x) { to[i] = to_float16(x); });
    else if (values != at<float>(row, column)) std::copy_n(values, size, at<float>(row, column));
  }

 private:
  template <class T>
  T* at(int64_t row, int64_t column) const {
    return static_cast<T*>(data) + row * stride + column;
  }
  template <class T, class Step>
  static void each(const T* from, int64_t size, Step step) {
#pragma omp simd
    for (int64_t i = 0; i < size; ++i) step(i, from[i]);
  }
};

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
  // A place of a mask, whose elements are bytes.
  const uint8_t* bytes(int64_t sequence, int64_t index, int64_t place) const {
    return static_cast<const uint8_t*>(data) + sequence * batch + index * head + place * token;
  }
};

template <class Step>
void for_pieces(int64_t first, int64_t end, Step step) {
  for (int64_t column = first; column < end; column += PIECE) step(column, std::min(PIECE, end - column));
}

// Load a piece of x + bias, [columns]; bias may be null.
inline void load_sum(float* out, const Rows& x, const float* bias, int64_t row, int64_t column, int64_t size) {
  if (!bias) return x.load(out, row, column, size);
  float buffer[PIECE];
  const float* const values = x.read(buffer, row, column, size);
#pragma omp simd
  for (int64_t i = 0; i < size; ++i) out[i] = values[i] + bias[column + i];
}

// Run task(0) .. task(tasks - 1) on the threads. The result of a task does not depend on the number of threads.
template <class Task>
void parallel(int64_t tasks, int64_t elements, int threads, Task task) {
#pragma omp parallel for num_threads(threads) if (threads > 1 && elements >= PARALLEL_FROM)
  for (int64_t index = 0; index < tasks; ++index) task(index);
}

// Return the sum of term(0) .. term(size - 1): in lanes, so that additions do not wait for each other, and in blocks,
// so that the error does not grow with the size.
template <class Term>
float sum(int64_t size, Term term) {
  constexpr int64_t LANES = 64, BLOCK = 4096;
  double total = 0.0;
  for (int64_t first = 0; first < size; first += BLOCK) {
    const int64_t end = std::min(first + BLOCK, size);
    alignas(64) float lanes[LANES] = {};
    int64_t i = first;
    for (; i + LANES <= end; i += LANES) {
#pragma omp simd
      for (int64_t lane = 0; lane < LANES; ++lane) lanes[lane] += term(i + lane);
    }
    for (int64_t lane = 0; i < end; ++i, ++lane) lanes[lane] += term(i);
    for (int64_t half = LANES / 2; half; half /= 2) {
#pragma omp simd
      for (int64_t lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
    }
    total += lanes[0];
  }
  return static_cast<float>(total);
}

// Sums over rows, such as the gradient of a bias: one task per block of rows; the sums of the blocks are added in
// order. The blocks follow from the number of rows alone, so the result is the same for any number of threads. A few
// rows are summed in float32, and these sums in float64: a long sum in float32 would have several times the error of
// torch's sum.
class RowSums {
 public:
  RowSums(int64_t rows, int64_t width)
      : width_(width), rows_(rows), block_(std::max<int64_t>(16, (rows + 63) / 64)), blocks_((rows + block_ - 1) / block_) {
    if (width_) sums_.reset(new double[blocks_ * width_]);
  }
  int64_t blocks() const { return blocks_; }

  // Call step(row, part) for each row of a block, to add its columns [first, end) to part, [end - first].
  template <class Step>
  void for_rows(int64_t block, int64_t first, int64_t end, Step step) const {
    constexpr int64_t FEW = 32;
    const int64_t size = width_ ? end - first : 0, last = std::min(rows_, (block + 1) * block_);
    double* const total = width_ ? sums_.get() + block * width_ + first : nullptr;
    const std::unique_ptr<float[]> part(new float[size]);
    std::fill_n(total, size, 0.0);
    for (int64_t row = block * block_; row < last;) {
      std::fill_n(part.get(), size, 0.0f);
      for (const int64_t stop = std::min(row + FEW, last); row < stop; ++row) step(row, part.get());
#pragma omp simd
      for (int64_t i = 0; i < size; ++i) total[i] += part[i];
    }
  }

  void add_blocks(float* out, int threads) const {
    parallel((width_ + PIECE - 1) / PIECE, blocks_ * width_, threads, [&](int64_t piece) {
      const int64_t first = piece * PIECE, size = std::min(PIECE, width_ - first);
      double total[PIECE] = {};
      for (int64_t block = 0; block < blocks_; ++block) {
        const double* const sums = sums_.get() + block * width_ + first;
#pragma omp simd
        for (int64_t i = 0; i < size; ++i) total[i] += sums[i];
      }
      std::copy_n(total, size, out + first);
    });
  }

 private:
  int64_t width_, rows_, block_, blocks_;
  std::unique_ptr<double[]> sums_;
};

}  // namespace fuselayers
