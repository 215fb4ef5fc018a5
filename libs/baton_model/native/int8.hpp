// Products of tokens of eight bits with a panel of weights of eight bits. Included by isa.hpp only.
#pragma once

namespace baton::kernels::BATON_ISA {

// Rows that go together: they read the weights once. Their sums fill the registers.
#if defined(__AVX512F__)
constexpr int kInt8Rows = 6;
#else
constexpr int kInt8Rows = 4;
#endif

#if defined(__AVX2__)

#if defined(__AVX512F__)
typedef __m512i Bytes;
constexpr int kInt8Columns = 4;  // vectors of outputs that several rows sum at a time
#else
typedef __m256i Bytes;
constexpr int kInt8Columns = 2;
#endif

#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
// Tokens are multiplied as they are, 128 too large, which `offsets` takes back.
constexpr bool kShifted = true;

struct Int8Weights {
    Bytes bytes;
    BATON_INLINE explicit Int8Weights(Bytes from) : bytes(from) {}
};

// For every lane: sum + the four products of its bytes.
BATON_INLINE Integers multiply_add_bytes(Integers sum, Bytes tokens, const Int8Weights &weights) {
#if defined(__AVX512F__)
    return (Integers)_mm512_dpbusd_epi32((__m512i)sum, tokens, weights.bytes);
#else
    return (Integers)_mm256_dpbusd_avx_epi32((__m256i)sum, tokens, weights.bytes);
#endif
}
#else
// Without VNNI bytes are multiplied unsigned by signed and added in pairs, in 16 bits. So the weights give their signs
// to the tokens: 2 * 127 * 127 fits, which 2 * 255 * 127 does not.
constexpr bool kShifted = false;

#if defined(__AVX512F__)
struct Int8Weights {
    Bytes magnitudes;
    __mmask64 negative;
    BATON_INLINE explicit Int8Weights(Bytes from)
        : magnitudes(_mm512_abs_epi8(from)), negative(_mm512_movepi8_mask(from)) {}
};

BATON_INLINE Integers multiply_add_bytes(Integers sum, Bytes tokens, const Int8Weights &weights) {
    const __m512i turned = _mm512_mask_sub_epi8(tokens, weights.negative, _mm512_setzero_si512(), tokens);
    const __m512i pairs = _mm512_maddubs_epi16(weights.magnitudes, turned);
    return sum + (Integers)_mm512_madd_epi16(pairs, _mm512_set1_epi16(1));
}
#else
struct Int8Weights {
    Bytes bytes, magnitudes;
    BATON_INLINE explicit Int8Weights(Bytes from) : bytes(from), magnitudes(_mm256_abs_epi8(from)) {}
};

BATON_INLINE Integers multiply_add_bytes(Integers sum, Bytes tokens, const Int8Weights &weights) {
    const __m256i pairs = _mm256_maddubs_epi16(weights.magnitudes, _mm256_sign_epi8(tokens, weights.bytes));
    return sum + (Integers)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
}
#endif
#endif

BATON_INLINE Bytes load_bytes(const void *from) {
    Bytes bytes;
    __builtin_memcpy(&bytes, from, kBytes);
    return bytes;
}

BATON_INLINE Bytes broadcast_tokens(const uint8_t *from) {
    uint32_t word;
    __builtin_memcpy(&word, from, 4);
    const Integers words = Integers{} + static_cast<int32_t>(kShifted ? word : word ^ 0x80808080u);
    return (Bytes)words;
}

// Bytes by which weights are asked for before they are used. One row gains nothing; eight take 6.3 ms for all linears of
// the default model instead of 7.0.
constexpr int64_t kAhead = 2048;

// sums[r, C vectors from `panel` on] of R rows.
template <int R, int C>
BATON_INLINE void int8_tile(const uint8_t *tokens, int64_t stride, const int8_t *panel, int64_t words,
                            const int32_t *offsets, int32_t *sums) {
    Integers totals[R][C];
    for (int c = 0; c < C; ++c) {
        const Integers start = kShifted ? (Integers)load_bytes(offsets + c * kLanes) : Integers{};
        for (int r = 0; r < R; ++r) totals[r][c] = start;
    }
    for (int64_t w = 0; w < words; ++w, panel += kPanel * 4) {
        Bytes rows[R];
        for (int r = 0; r < R; ++r) rows[r] = broadcast_tokens(tokens + r * stride + w * 4);
        for (int c = 0; c < C; ++c) {
            if (c * kBytes % 64 == 0) __builtin_prefetch(panel + c * kBytes + kAhead);
            const Int8Weights weights(load_bytes(panel + c * kBytes));
            for (int r = 0; r < R; ++r) totals[r][c] = multiply_add_bytes(totals[r][c], rows[r], weights);
        }
    }
    for (int r = 0; r < R; ++r)
        for (int c = 0; c < C; ++c) __builtin_memcpy(sums + r * kPanel + c * kLanes, &totals[r][c], kBytes);
}

// One row takes all of a panel at a time, so that the memory is read in order.
template <int R>
void int8_sums(const uint8_t *tokens, int64_t stride, const int8_t *panel, int64_t words, const int32_t *offsets,
               int32_t *sums) {
    constexpr int C = R == 1 ? kPanel / kLanes : kInt8Columns;
    for (int64_t c = 0; c < kPanel; c += C * kLanes)
        int8_tile<R, C>(tokens, stride, panel + c * 4, words, offsets + c, sums + c);
}

#else

template <int R>
void int8_sums(const uint8_t *tokens, int64_t stride, const int8_t *panel, int64_t words, const int32_t *,
               int32_t *sums) {
    __builtin_memset(sums, 0, R * kPanel * sizeof(int32_t));
    for (int64_t w = 0; w < words; ++w, panel += kPanel * 4)
        for (int r = 0; r < R; ++r) {
            int16_t token[4];
            for (int i = 0; i < 4; ++i) token[i] = static_cast<int16_t>(tokens[r * stride + w * 4 + i] - 128);
            for (int64_t lane = 0; lane < kPanel; ++lane) {
                int32_t total = 0;
                for (int i = 0; i < 4; ++i) total += token[i] * static_cast<int16_t>(panel[lane * 4 + i]);
                sums[r * kPanel + lane] += total;
            }
        }
}

#endif

template <typename Type, int R>
void int8_rows(const Int8Panel &panel, int64_t first) {
    typedef typename Type::Element Element;
    alignas(64) int32_t sums[R * kPanel];
    int8_sums<R>(panel.tokens + first * panel.token_stride, panel.token_stride, panel.weights, panel.words,
                 panel.offsets, sums);
    const Element *bias = static_cast<const Element *>(panel.bias);
    for (int r = 0; r < R; ++r) {
        const float scale = panel.token_scales[first + r];
        const int32_t *row = sums + r * kPanel;
        Element *out = static_cast<Element *>(panel.out) + (first + r) * panel.out_stride;
        int64_t i = 0;
        for (; i + kLanes <= panel.outputs; i += kLanes) {
            Integers whole;
            __builtin_memcpy(&whole, row + i, kBytes);
            const Vector offset = bias != nullptr ? Type::load(bias + i) : Vector{};
            Type::store(out + i,
                        __builtin_convertvector(whole, Vector) * (Float32::load(panel.scales + i) * scale) + offset);
        }
        for (; i < panel.outputs; ++i)
            Type::store1(out + i, static_cast<float>(row[i]) * (panel.scales[i] * scale) +
                                      (bias != nullptr ? Type::load1(bias + i) : 0));
    }
}

template <typename Type>
void int8_panel_rows(const Int8Panel &panel, int64_t first, int64_t rows) {
    switch (rows) {
        case 1: return int8_rows<Type, 1>(panel, first);
        case 2: return int8_rows<Type, 2>(panel, first);
        case 3: return int8_rows<Type, 3>(panel, first);
        case 4: return int8_rows<Type, 4>(panel, first);
#if defined(__AVX512F__)
        case 5: return int8_rows<Type, 5>(panel, first);
        case 6: return int8_rows<Type, 6>(panel, first);
#endif
    }
}

inline void int8_panel(const Int8Panel &panel, int64_t rows, bool bfloat16) {
    // Evenly: eight rows as four and four are quicker than as six and two.
    const int64_t tiles = (rows + kInt8Rows - 1) / kInt8Rows;
    for (int64_t tile = 0; tile < tiles; ++tile) {
        const int64_t first = rows * tile / tiles, count = rows * (tile + 1) / tiles - first;
        if (bfloat16)
            int8_panel_rows<Bfloat16>(panel, first, count);
        else
            int8_panel_rows<Float32>(panel, first, count);
    }
}

}  // namespace baton::kernels::BATON_ISA
