#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <vector>

#include "attention_step.hpp"
#include "int8_matrix.hpp"
#include "kernels.hpp"
#include "parts.hpp"

namespace nb = nanobind;
using namespace nb::literals;
using namespace baton::kernels;

namespace {

using Address = uintptr_t;
using NoGil = nb::call_guard<nb::gil_scoped_release>;

template <typename T>
T *at(Address address) {
    return reinterpret_cast<T *>(address);
}

int64_t width(bool bfloat16) { return bfloat16 ? 2 : 4; }

}  // namespace

NB_MODULE(_kernels, m) {
    m.def("instruction_set", [] { return std::string(kernels().name); });

    nb::class_<AttentionStep>(m, "AttentionStep")
        .def(
            "__init__",
            [](AttentionStep *self, int64_t heads, int64_t kv_heads, int64_t page_size, int64_t head_dim,
               bool tokens_first, bool bfloat16, const std::vector<int64_t> &query_lens,
               const std::vector<int64_t> &context_lens, const std::vector<std::vector<int32_t>> &tables, int threads) {
                new (self) AttentionStep({kv_heads, page_size, head_dim, tokens_first, bfloat16}, heads, query_lens,
                                         context_lens, tables, threads);
            },
            nb::kw_only(), "heads"_a, "kv_heads"_a, "page_size"_a, "head_dim"_a, "tokens_first"_a, "bfloat16"_a,
            "query_lens"_a, "context_lens"_a, "tables"_a, "threads"_a)
        .def(
            "run",
            [](const AttentionStep &self, Address cache, Address queries, int64_t query_stride, Address entries,
               int64_t entry_stride, Address out) {
                self.run(at<void>(cache), at<void>(queries), query_stride, at<void>(entries), entry_stride, at<void>(out));
            },
            NoGil());

    nb::class_<Int8Matrix>(m, "Int8Matrix")
        .def(
            "__init__",
            [](Int8Matrix *self, Address weights, Address scales, int64_t outputs, int64_t inputs, int64_t block) {
                new (self) Int8Matrix(at<int8_t>(weights), at<float>(scales), outputs, inputs, block);
            },
            NoGil())
        .def(
            "multiply",
            [](const Int8Matrix &self, Address x, Address bias, Address out, int64_t rows, bool bfloat16, int threads) {
                self.multiply(at<void>(x), at<void>(bias), at<void>(out), rows, bfloat16, threads);
            },
            NoGil());

    m.def(
        "rms_norm",
        [](Address x, Address weight, Address out, int64_t rows, int64_t size, float eps, bool bfloat16, int threads) {
            in_parts(rows, size, threads, [&](int64_t first, int64_t count) {
                const int64_t offset = first * size * width(bfloat16);
                kernels().rms_norm(at<char>(x) + offset, at<void>(weight), at<char>(out) + offset, count, size, eps,
                                   bfloat16);
            });
        },
        NoGil());
    m.def(
        "silu_and_mul",
        [](Address x, Address out, int64_t rows, int64_t inner, bool bfloat16, int threads) {
            in_parts(rows, inner, threads, [&](int64_t first, int64_t count) {
                const int64_t offset = first * inner * width(bfloat16);
                kernels().silu_and_mul(at<char>(x) + 2 * offset, at<char>(out) + offset, count, inner, bfloat16);
            });
        },
        NoGil());
    m.def(
        "rotate",
        [](Address x, int64_t stride, Address cos, Address sin, int64_t rows, int64_t heads, int64_t head_dim,
           bool bfloat16, int threads) {
            in_parts(rows, heads * head_dim, threads, [&](int64_t first, int64_t count) {
                const int64_t offset = first * head_dim * width(bfloat16);
                kernels().rotate(at<char>(x) + first * stride * width(bfloat16), stride, at<char>(cos) + offset,
                                 at<char>(sin) + offset, count, heads, head_dim, bfloat16);
            });
        },
        NoGil());
    m.def("uniform", &uniform);
    m.def("draw", [](Address logits, int64_t size, const std::vector<float> &temperatures,
                     const std::vector<double> &top_p, const std::vector<int64_t> &top_k,
                     const std::vector<uint64_t> &seeds, const std::vector<uint64_t> &positions, int threads) {
        const int64_t rows = static_cast<int64_t>(temperatures.size());
        std::vector<int64_t> tokens(temperatures.size());
        nb::gil_scoped_release released;
        in_parts(rows, size, threads, [&](int64_t first, int64_t count) {
            const int64_t blocks = (size + 255) / 256;
            std::vector<float> weights(static_cast<size_t>(2 * blocks * 256));
            std::vector<double> sums(static_cast<size_t>(blocks));
            for (int64_t row = first; row < first + count; ++row)
                tokens[row] = kernels().draw(
                    at<float>(logits) + row * size, size,
                    {temperatures[row], top_p[row], top_k[row], seeds[row], positions[row]}, weights.data(), sums.data());
        });
        return tokens;
    });
}
