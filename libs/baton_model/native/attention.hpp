// Attention straight over the pages of a cache, in one pass with a running maximum (FlashAttention-2, Dao, 2023; online
// softmax: Milakov and Gimelshein, 2018). Included by isa.hpp only.
//
// The rows of a task meet the keys block by block. A block's keys and values are copied once into the order in which
// they are multiplied: keys transposed, both padded with zeros. Six rows at a time then go through scores, softmax and
// sum without leaving the first-level cache.
//
// Operands are words of 32 bits: a float, or with AVX512-BF16 a pair of neighbours along the dimension that is summed
// over. Without it bfloat16 is widened when copied.
#pragma once

namespace baton::kernels::BATON_ISA {

// Keys in a block.
constexpr int64_t kBlock = 128;
// Rows that go together, and vectors of a row that are summed at a time: accumulators fill the registers.
constexpr int kRows = 6;
#if defined(__AVX2__) && !defined(__AVX512F__)
constexpr int kColumns = 2;
#else
constexpr int kColumns = 4;
#endif

BATON_INLINE int64_t round_up(int64_t value, int64_t step) { return (value + step - 1) / step * step; }

#if defined(__AVX512F__)
// 16 rows of 16 words to 16 columns: out[w * out_stride + r] = rows[r][w].
inline void transpose16(const char *const *rows, int64_t offset, uint32_t *out, int64_t out_stride) {
    __m512i a[16], b[16];
    for (int r = 0; r < 16; ++r) a[r] = _mm512_loadu_si512(rows[r] + offset);
    for (int r = 0; r < 16; r += 2) {
        b[r] = _mm512_unpacklo_epi32(a[r], a[r + 1]);
        b[r + 1] = _mm512_unpackhi_epi32(a[r], a[r + 1]);
    }
    for (int r = 0; r < 16; r += 4) {
        a[r] = _mm512_unpacklo_epi64(b[r], b[r + 2]);
        a[r + 1] = _mm512_unpackhi_epi64(b[r], b[r + 2]);
        a[r + 2] = _mm512_unpacklo_epi64(b[r + 1], b[r + 3]);
        a[r + 3] = _mm512_unpackhi_epi64(b[r + 1], b[r + 3]);
    }
    // a[4 q + c], lane l: words 4 l + c of rows 4 q to 4 q + 3.
    for (int c = 0; c < 4; ++c) {
        const __m512i low = _mm512_shuffle_i32x4(a[c], a[4 + c], 0x88), high = _mm512_shuffle_i32x4(a[c], a[4 + c], 0xDD);
        const __m512i low2 = _mm512_shuffle_i32x4(a[8 + c], a[12 + c], 0x88),
                      high2 = _mm512_shuffle_i32x4(a[8 + c], a[12 + c], 0xDD);
        _mm512_storeu_si512(out + (0 + c) * out_stride, _mm512_shuffle_i32x4(low, low2, 0x88));
        _mm512_storeu_si512(out + (8 + c) * out_stride, _mm512_shuffle_i32x4(low, low2, 0xDD));
        _mm512_storeu_si512(out + (4 + c) * out_stride, _mm512_shuffle_i32x4(high, high2, 0x88));
        _mm512_storeu_si512(out + (12 + c) * out_stride, _mm512_shuffle_i32x4(high, high2, 0xDD));
    }
}
#endif

// Words of `count` rows side by side: out[w * kBlock + r] = rows[r][w], w < words; rows up to `padded` become zero.
inline void transpose(const char *const *rows, int64_t count, int64_t padded, int64_t words, uint32_t *out) {
    int64_t r = 0;
#if defined(__AVX512F__)
    for (; r + 16 <= count; r += 16) {
        int64_t w = 0;
        for (; w + 16 <= words; w += 16) transpose16(rows + r, w * 4, out + w * kBlock + r, kBlock);
        for (; w < words; ++w)
            for (int64_t i = r; i < r + 16; ++i) __builtin_memcpy(out + w * kBlock + i, rows[i] + w * 4, 4);
    }
#endif
    for (; r < count; ++r)
        for (int64_t w = 0; w < words; ++w) __builtin_memcpy(out + w * kBlock + r, rows[r] + w * 4, 4);
    if (count < padded)
        for (int64_t w = 0; w < words; ++w)
            __builtin_memset(out + w * kBlock + count, 0, static_cast<std::size_t>(padded - count) * 4);
}

// How elements become words, and how words are multiplied.
template <typename Type>
struct Widened {
    typedef typename Type::Element Element;
    // Elements in a word.
    static constexpr int64_t kPack = 1;
    static BATON_INLINE Vector multiply_add(Vector sum, uint32_t a, Vector b) {
        float value;
        __builtin_memcpy(&value, &a, 4);
        return sum + broadcast(value) * b;
    }
    static BATON_INLINE void store_weights(uint32_t *to, Vector weights) {
        Float32::store(reinterpret_cast<float *>(to), weights);
    }
    static void copy_row(const Element *from, uint32_t *to, int64_t size, int64_t padded) {
        float *out = reinterpret_cast<float *>(to);
        int64_t i = 0;
        for (; i + kLanes <= size; i += kLanes) Float32::store(out + i, Type::load(from + i));
        for (; i < size; ++i) out[i] = Type::load1(from + i);
        for (; i < padded; ++i) out[i] = 0;
    }
    static void copy_keys(const char *const *rows, int64_t count, int64_t padded, int64_t size, uint32_t *out,
                          uint32_t *scratch) {
        if (sizeof(Element) == 4) return transpose(rows, count, padded, size, out);
        const char *widened[kBlock];
        for (int64_t r = 0; r < count; ++r) {
            copy_row(reinterpret_cast<const Element *>(rows[r]), scratch + r * size, size, size);
            widened[r] = reinterpret_cast<const char *>(scratch + r * size);
        }
        transpose(widened, count, padded, size, out);
    }
    // To [padded, width].
    static void copy_values(const char *const *rows, int64_t count, int64_t padded, int64_t size, int64_t width,
                            uint32_t *out) {
        for (int64_t r = 0; r < count; ++r)
            copy_row(reinterpret_cast<const Element *>(rows[r]), out + r * width, size, width);
        __builtin_memset(out + count * width, 0, static_cast<std::size_t>((padded - count) * width) * 4);
    }
};

#if defined(__AVX512BF16__)
struct Pairs {
    typedef uint16_t Element;
    static constexpr int64_t kPack = 2;
    static BATON_INLINE Vector multiply_add(Vector sum, uint32_t a, Vector b) {
        return (Vector)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32(static_cast<int>(a)), (__m512bh)b);
    }
    static BATON_INLINE void store_weights(uint32_t *to, Vector weights) {
        Bfloat16::store(reinterpret_cast<uint16_t *>(to), weights);
    }
    static void copy_row(const Element *from, uint32_t *to, int64_t size, int64_t padded) {
        __builtin_memcpy(to, from, static_cast<std::size_t>(size) * 2);
        __builtin_memset(reinterpret_cast<char *>(to) + size * 2, 0, static_cast<std::size_t>(padded - size) * 2);
    }
    static void copy_keys(const char *const *rows, int64_t count, int64_t padded, int64_t size, uint32_t *out,
                          uint32_t *) {
        transpose(rows, count, padded, size / 2, out);
    }
    // To [padded / 2, width] of pairs of rows.
    static void copy_values(const char *const *rows, int64_t count, int64_t padded, int64_t size, int64_t width,
                            uint32_t *out) {
        for (int64_t r = 0; r < padded; r += 2, out += width) {
            int64_t i = 0;
            for (; i < width; i += 16) {
                const int64_t left = size - i;
                const __mmask16 mask = left >= 16 ? 0xFFFF : static_cast<__mmask16>((1u << left) - 1);
                const __m256i none = _mm256_setzero_si256();
                const __m256i even = r < count ? _mm256_maskz_loadu_epi16(mask, rows[r] + i * 2) : none;
                const __m256i odd = r + 1 < count ? _mm256_maskz_loadu_epi16(mask, rows[r + 1] + i * 2) : none;
                _mm512_storeu_si512(out + i, _mm512_or_si512(_mm512_cvtepu16_epi32(even),
                                                             _mm512_slli_epi32(_mm512_cvtepu16_epi32(odd), 16)));
            }
        }
    }
};
typedef Pairs Bfloat16Words;
#else
typedef Widened<Bfloat16> Bfloat16Words;
#endif

// out[r, 0 .. C vectors] = (accumulate ? out : 0) + sum over w of a[r, w] * b[w, 0 .. C vectors].
template <typename Words, int R, int C>
BATON_INLINE void multiply_tile(const uint32_t *a, int64_t a_stride, const uint32_t *b, int64_t b_stride, int64_t words,
                                float *out, int64_t out_stride, bool accumulate) {
    Vector sums[R][C];
    for (int r = 0; r < R; ++r)
        for (int c = 0; c < C; ++c)
            sums[r][c] = accumulate ? Float32::load(out + r * out_stride + c * kLanes) : Vector{};
    for (int64_t w = 0; w < words; ++w) {
        Vector columns[C];
        for (int c = 0; c < C; ++c)
            columns[c] = Float32::load(reinterpret_cast<const float *>(b + w * b_stride) + c * kLanes);
        for (int r = 0; r < R; ++r)
            for (int c = 0; c < C; ++c) sums[r][c] = Words::multiply_add(sums[r][c], a[r * a_stride + w], columns[c]);
    }
    for (int r = 0; r < R; ++r)
        for (int c = 0; c < C; ++c) Float32::store(out + r * out_stride + c * kLanes, sums[r][c]);
}

// The same over `columns`, a multiple of the lanes.
template <typename Words, int R>
void multiply(const uint32_t *a, int64_t a_stride, const uint32_t *b, int64_t b_stride, int64_t words, float *out,
              int64_t out_stride, int64_t columns, bool accumulate) {
    int64_t c = 0;
    for (; c + kColumns * kLanes <= columns; c += kColumns * kLanes)
        multiply_tile<Words, R, kColumns>(a, a_stride, b + c, b_stride, words, out + c, out_stride, accumulate);
    for (; c < columns; c += kLanes)
        multiply_tile<Words, R, 1>(a, a_stride, b + c, b_stride, words, out + c, out_stride, accumulate);
}

// Where everything of a task lies in its scratch memory, in words.
struct Scratch {
    int64_t width, queries, sums, maxima, totals, keys, values, scores, weights, widened, end;

    Scratch(int64_t rows, int64_t head_dim) {
        width = round_up(head_dim, kLanes);
        int64_t at = 0;
        const auto take = [&at](int64_t words) {
            const int64_t start = at;
            at += round_up(words, 16);
            return start;
        };
        queries = take(rows * width);
        sums = take(rows * width);
        maxima = take(rows);
        totals = take(rows);
        keys = take(width * kBlock);
        values = take(width * kBlock);
        scores = take(kRows * kBlock);
        weights = take(kRows * kBlock);
        widened = take(width * kBlock);
        end = at;
    }
};

inline int64_t attend_scratch(int64_t rows, int64_t head_dim) { return Scratch(rows, head_dim).end * 4; }

// R rows meet one block: `seen[r]` of its `keys` are visible to row r (0 to `keys`); `padded` are there.
template <typename Words, int R>
void attend_block(const uint32_t *queries, const uint32_t *keys, const uint32_t *values, int64_t padded,
                  const int64_t *seen, int64_t query_words, int64_t width, float scale, float *scores,
                  uint32_t *weights, float *sums, float *maxima, float *totals) {
    multiply<Words, R>(queries, width / Words::kPack, keys, kBlock, query_words, scores, kBlock, padded, false);
    for (int r = 0; r < R; ++r) {
        float *row = scores + r * kBlock;
        uint32_t *weight = weights + r * (kBlock / Words::kPack);
        if (seen[r] <= 0) {
            __builtin_memset(weight, 0, static_cast<std::size_t>(padded / Words::kPack) * 4);
            continue;
        }
        for (int64_t k = seen[r]; k < padded; ++k) row[k] = -__builtin_inff();
        Vector best = Float32::load(row);
        for (int64_t k = kLanes; k < padded; k += kLanes) best = larger(best, Float32::load(row + k));
        const float before = maxima[r], block = largest(best) * scale, now = block > before ? block : before;
        Vector total{};
        for (int64_t k = 0; k < padded; k += kLanes) {
            const Vector power = exp2(Float32::load(row + k) * scale - now);
            Words::store_weights(weight + k / Words::kPack, power);
            total += power;
        }
        const float factor = exp2(broadcast(before - now))[0];
        maxima[r] = now;
        totals[r] = totals[r] * factor + sum(total);
        if (factor != 1.0f)
            for (int64_t d = 0; d < width; d += kLanes)
                Float32::store(sums + r * width + d, Float32::load(sums + r * width + d) * factor);
    }
    multiply<Words, R>(weights, kBlock / Words::kPack, values, width, padded / Words::kPack, sums, width, width, true);
}

template <typename Words>
void attend_rows(int64_t rows, const uint32_t *queries, const uint32_t *keys, const uint32_t *values, int64_t padded,
                 const int64_t *seen, int64_t query_words, int64_t width, float scale, float *scores,
                 uint32_t *weights, float *sums, float *maxima, float *totals) {
#define BATON_ROWS(count)                                                                                       \
    case count:                                                                                                 \
        return attend_block<Words, count>(queries, keys, values, padded, seen, query_words, width, scale, scores, \
                                          weights, sums, maxima, totals);
    switch (rows) {
        BATON_ROWS(1)
        BATON_ROWS(2)
        BATON_ROWS(3)
        BATON_ROWS(4)
        BATON_ROWS(5)
        BATON_ROWS(6)
    }
#undef BATON_ROWS
}

template <typename Words, typename Type>
void attend_task(const AttentionTask &task, void *memory) {
    typedef typename Type::Element Element;
    const Scratch at(task.rows, task.head_dim);
    uint32_t *words = static_cast<uint32_t *>(memory);
    float *floats = static_cast<float *>(memory);
    // Weights are powers of two: exp(x) = 2^(x log2 e).
    const float scale = task.scale * 1.44269504f;
    const int64_t query_words = round_up(task.head_dim, Words::kPack) / Words::kPack;

    for (int64_t r = 0; r < task.rows; ++r) {
        const Element *from = static_cast<const Element *>(task.query) + r / task.group * task.query_stride +
                              r % task.group * task.head_dim;
        Words::copy_row(from, words + at.queries + r * (at.width / Words::kPack), task.head_dim, at.width);
        floats[at.maxima + r] = -__builtin_inff();
        floats[at.totals + r] = 0;
    }
    __builtin_memset(floats + at.sums, 0, static_cast<std::size_t>(task.rows * at.width) * 4);

    const int64_t context = task.visible + (task.rows - 1) / task.group;
    for (int64_t start = 0; start < context; start += kBlock) {
        const int64_t count = context - start < kBlock ? context - start : kBlock;
        const int64_t padded = round_up(count, kLanes);
        const char *key_rows[kBlock], *value_rows[kBlock];
        int64_t page = start / task.page_size, offset = start % task.page_size;
        for (int64_t k = 0; k < count; ++k) {
            const int64_t byte = task.pages[page] * task.page_stride + offset * task.token_stride;
            key_rows[k] = task.keys + byte;
            value_rows[k] = task.values + byte;
            if (++offset == task.page_size) offset = 0, ++page;
        }
        Words::copy_keys(key_rows, count, padded, task.head_dim, words + at.keys, words + at.widened);
        Words::copy_values(value_rows, count, padded, task.head_dim, at.width, words + at.values);
        for (int64_t first = 0; first < task.rows; first += kRows) {
            const int64_t rows = task.rows - first < kRows ? task.rows - first : kRows;
            int64_t seen[kRows], most = 0;
            for (int64_t r = 0; r < rows; ++r) {
                const int64_t left = task.visible + (first + r) / task.group - start;
                seen[r] = left < count ? left : count;
                most = seen[r] > most ? seen[r] : most;
            }
            if (most <= 0) continue;
            attend_rows<Words>(rows, words + at.queries + first * (at.width / Words::kPack), words + at.keys,
                               words + at.values, round_up(most, kLanes), seen, query_words, at.width, scale,
                               floats + at.scores, words + at.weights, floats + at.sums + first * at.width,
                               floats + at.maxima + first, floats + at.totals + first);
        }
    }

    for (int64_t r = 0; r < task.rows; ++r) {
        Element *to =
            static_cast<Element *>(task.out) + r / task.group * task.out_stride + r % task.group * task.head_dim;
        const float *from = floats + at.sums + r * at.width;
        const float factor = 1.0f / floats[at.totals + r];
        int64_t d = 0;
        for (; d + kLanes <= task.head_dim; d += kLanes) Type::store(to + d, Float32::load(from + d) * factor);
        for (; d < task.head_dim; ++d) Type::store1(to + d, from[d] * factor);
    }
}

inline void attend(const AttentionTask &task, bool bfloat16, void *scratch) {
    if (bfloat16)
        attend_task<Bfloat16Words, Bfloat16>(task, scratch);
    else
        attend_task<Widened<Float32>, Float32>(task, scratch);
}

}  // namespace baton::kernels::BATON_ISA
