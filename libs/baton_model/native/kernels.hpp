// What every instruction set implements. Plain functions over pointers: no allocation, no exception, no Python.
#pragma once

#include <cstddef>
#include <cstdint>

namespace baton::kernels {

// One key-value head's share of one sequence's new tokens: rows are (token, query head of the group), token by token.
struct AttentionTask {
    // The cache of a layer at this head's first key and value; strides in bytes.
    const char *keys;
    const char *values;
    int64_t page_stride;
    int64_t token_stride;
    int64_t page_size;
    const int32_t *pages;
    int64_t head_dim;
    // Row r reads `query + (r / group) * query_stride + (r % group) * head_dim`, in elements, and writes `out` likewise.
    const void *query;
    void *out;
    int64_t query_stride;
    int64_t out_stride;
    int64_t group;
    int64_t rows;
    // Tokens that row 0 sees; each further token of the task sees one more.
    int64_t visible;
    float scale;
};

// Some key-value heads' share of a sequence with one new token.
struct DecodeTask {
    // The cache of a layer at the first of these heads' first key and value; strides in bytes.
    const char *keys;
    const char *values;
    int64_t page_stride;
    int64_t token_stride;
    int64_t head_stride;
    // From the first byte of these heads' keys in a page to the last, and likewise of the values.
    int64_t run;
    int64_t page_size;
    const int32_t *pages;
    int64_t context;
    int64_t head_dim;
    int64_t heads;
    // [heads, group, head_dim]
    const void *query;
    void *out;
    int64_t group;
    float scale;
};

// Outputs of a linear whose weights lie together.
constexpr int64_t kPanel = 64;

// Some rows of tokens times a panel: out = (tokens - 128) . weights * scales * token_scales + bias.
struct Int8Panel {
    // u8 [rows, 4 * words], 128 for zero, rows `token_stride` bytes apart, and float [rows].
    const uint8_t *tokens;
    const float *token_scales;
    int64_t token_stride;
    // s8 [words, kPanel, 4], each word the weights of four inputs, none of them -128; zero beyond the outputs.
    // Sums have 32 bits, enough for 16,000 words.
    const int8_t *weights;
    int64_t words;
    // For each output: -128 times the sum of its weights, and its scale. [kPanel]
    const int32_t *offsets;
    const float *scales;
    // Of the elements' type, both at the panel's first output; bias may be null. Rows of out are `out_stride` elements
    // apart, and `outputs` of each are written.
    const void *bias;
    void *out;
    int64_t out_stride;
    int64_t outputs;
};

// How a token is drawn: temperature 0 or less is greedy, top_k 0 and top_p 1 keep all.
struct Draw {
    float temperature;
    double top_p;
    int64_t top_k;
    uint64_t seed;
    uint64_t position;
};

// A number in [0, 1) hashed from its arguments (splitmix64's finaliser, applied to each in turn).
double uniform(uint64_t seed, uint64_t position, uint64_t attempt);

struct Kernels {
    const char *name;
    // Bytes of scratch memory, aligned to 64, that `attend` needs for a task of so many rows.
    int64_t (*attend_scratch)(int64_t rows, int64_t head_dim);
    void (*attend)(const AttentionTask &task, bool bfloat16, void *scratch);
    // Bytes of scratch memory, aligned to 64, that `decode` needs for so many query heads; 0 where only `attend` can.
    int64_t (*decode_scratch)(int64_t rows, int64_t head_dim, bool bfloat16);
    void (*decode)(const DecodeTask &task, void *scratch);
    // x, weight, out: [rows, size].
    void (*rms_norm)(const void *x, const void *weight, void *out, int64_t rows, int64_t size, float eps, bool bfloat16);
    // x: [rows, 2 * inner]; out: [rows, inner].
    void (*silu_and_mul)(const void *x, void *out, int64_t rows, int64_t inner, bool bfloat16);
    // x: [rows, heads, head_dim], rows `stride` elements apart; cos, sin: [rows, head_dim], the sine signed.
    void (*rotate)(void *x, int64_t stride, const void *cos, const void *sin, int64_t rows, int64_t heads,
                   int64_t head_dim, bool bfloat16);
    // x: [rows, size] -> tokens: u8, rows `stride` bytes apart, 128 for zero and beyond the size, and scales: float
    // [rows]. Blocks of `block` inputs, a power of two, are multiplied by Hadamard's matrix of that size first.
    // `scratch`: float [size].
    void (*quantize)(const void *x, uint8_t *tokens, int64_t stride, float *scales, float *scratch, int64_t rows,
                     int64_t size, int64_t block, bool bfloat16);
    void (*int8_panel)(const Int8Panel &panel, int64_t rows, bool bfloat16);
    // The token drawn from logits [size], or -1 where the largest is not finite. top-p applies to what top-k leaves, as
    // in transformers and vLLM. Scratch: `weights` [twice the size, up to a multiple of
    // 256], `blocks` [a 256th of the size].
    int64_t (*draw)(const float *logits, int64_t size, const Draw &wanted, float *weights, double *blocks);
};

extern const Kernels portable_kernels;
#if defined(__x86_64__)
extern const Kernels avx2_kernels;
extern const Kernels avxvnni_kernels;
extern const Kernels avx512_kernels;
extern const Kernels avx512vnni_kernels;
extern const Kernels avx512bf16_kernels;
#endif

// The best that this processor runs, or the one that the environment variable BATON_KERNELS names.
const Kernels &kernels();

}  // namespace baton::kernels
