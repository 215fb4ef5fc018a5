// Weights of eight bits, in the order in which they are multiplied.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "kernels.hpp"

namespace baton::kernels {

class Int8Matrix {
public:
    // `weights`: s8 [outputs, inputs], none of them -128; `scales`: float [outputs]. Both are copied. Tokens are to be
    // multiplied by Hadamard's matrix in blocks of `block` inputs, a power of two that divides `inputs`.
    Int8Matrix(const int8_t *weights, const float *scales, int64_t outputs, int64_t inputs, int64_t block);

    // x: [rows, inputs] -> out: [rows, outputs]; bias: [outputs] or null.
    void multiply(const void *x, const void *bias, void *out, int64_t rows, bool bfloat16, int threads) const;

private:
    struct Free {
        void operator()(void *memory) const;
    };

    int64_t outputs_, inputs_, block_, words_, panels_;
    std::unique_ptr<int8_t, Free> weights_;
    std::vector<int32_t> offsets_;
    std::vector<float> scales_;
};

}  // namespace baton::kernels
