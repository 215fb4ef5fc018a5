#include "int8_matrix.hpp"

#include <algorithm>
#include <cstdlib>
#include <new>

#include "parts.hpp"
#include "scratch.hpp"

namespace baton::kernels {

namespace {

// Rows that meet a panel together: those of 1,536 inputs leave half of a second-level cache of a megabyte to the rest.
constexpr int64_t kBandRows = 256;

}  // namespace

void Int8Matrix::Free::operator()(void *memory) const { std::free(memory); }

Int8Matrix::Int8Matrix(const int8_t *weights, const float *scales, int64_t outputs, int64_t inputs, int64_t block)
    : outputs_(outputs),
      inputs_(inputs),
      block_(block),
      words_((inputs + 3) / 4),
      panels_((outputs + kPanel - 1) / kPanel),
      weights_(static_cast<int8_t *>(std::aligned_alloc(64, static_cast<size_t>(panels_ * words_ * kPanel * 4)))),
      offsets_(static_cast<size_t>(panels_ * kPanel)),
      scales_(static_cast<size_t>(panels_ * kPanel)) {
    if (!weights_) throw std::bad_alloc();
    std::copy(scales, scales + outputs, scales_.begin());
    uint32_t *to = reinterpret_cast<uint32_t *>(weights_.get());
    for (int64_t output = 0; output < panels_ * kPanel; ++output) {
        const int8_t *row = weights + output * inputs;
        uint32_t *words = to + output / kPanel * kPanel * words_ + output % kPanel;
        int32_t sum = 0;
        for (int64_t word = 0; word < words_; ++word) {
            int8_t four[4] = {};
            const int64_t count = output < outputs ? std::min<int64_t>(4, inputs - word * 4) : 0;
            for (int64_t i = 0; i < count; ++i) sum += four[i] = row[word * 4 + i];
            __builtin_memcpy(words + word * kPanel, four, 4);
        }
        offsets_[static_cast<size_t>(output)] = -128 * sum;
    }
}

void Int8Matrix::multiply(const void *x, const void *bias, void *out, int64_t rows, bool bfloat16, int threads) const {
    const int64_t element = bfloat16 ? 2 : 4, stride = words_ * 4;
    const Kernels &kernel = kernels();
    char *memory = static_cast<char *>(scratch(rows * (stride + 4)));
    float *token_scales = reinterpret_cast<float *>(memory);
    uint8_t *tokens = reinterpret_cast<uint8_t *>(memory + rows * 4);
    in_parts(rows, inputs_, threads, [&](int64_t first, int64_t count) {
        std::vector<float> values(static_cast<size_t>(inputs_));
        kernel.quantize(static_cast<const char *>(x) + first * inputs_ * element, tokens + first * stride, stride,
                        token_scales + first, values.data(), count, inputs_, block_, bfloat16);
    });
    // Neighbouring panels one after the other in each thread: few rows read the weights as they lie.
    const int64_t bands = (rows + kBandRows - 1) / kBandRows;
    in_parts(bands * panels_, words_ * 4 * kPanel, threads, [&](int64_t start, int64_t count) {
        for (int64_t task = start; task < start + count; ++task) {
            const int64_t first = rows * (task / panels_) / bands, last = rows * (task / panels_ + 1) / bands;
            const int64_t number = task % panels_, output = number * kPanel;
            Int8Panel panel;
            panel.tokens = tokens + first * stride;
            panel.token_scales = token_scales + first;
            panel.token_stride = stride;
            panel.weights = weights_.get() + number * words_ * kPanel * 4;
            panel.words = words_;
            panel.offsets = offsets_.data() + output;
            panel.scales = scales_.data() + output;
            panel.bias = bias == nullptr ? nullptr : static_cast<const char *>(bias) + output * element;
            panel.out = static_cast<char *>(out) + (first * outputs_ + output) * element;
            panel.out_stride = outputs_;
            panel.outputs = std::min(kPanel, outputs_ - output);
            kernel.int8_panel(panel, last - first, bfloat16);
        }
    });
}

}  // namespace baton::kernels
