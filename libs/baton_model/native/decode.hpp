// Attention of one new token of a sequence over the pages of its cache, in one pass as attention.hpp has it, but of
// several heads at a time: pages are read about as they lie, and nothing is copied. For bfloat16 with AVX512-BF16.
// Included by isa.hpp only.
#pragma once

namespace baton::kernels::BATON_ISA {

#if defined(__AVX512BF16__)

// Keys in a block, each asked for a block ahead: both together should fit a first-level cache. 2,048 tokens of 3 heads of
// 64, 30 layers, take 1.6 ms (1.8 with pages shuffled), with 64 keys 1.8 (2.5), without asking ahead 5.2 (5.9).
constexpr int64_t kDecodeKeys = 32;
// Query heads that go together.
constexpr int64_t kDecodeRows = 6;
// Elements of a vector of keys or values.
constexpr int64_t kHalves = 32;

// Asks for lines of the pages in the order of memory: a head's rows are short runs, which no processor foresees.
class PagesAhead {
public:
    BATON_INLINE explicit PagesAhead(const DecodeTask &task)
        : task_(task), pages_((task.context + task.page_size - 1) / task.page_size) {
        start();
    }

    BATON_INLINE void ask(int64_t lines) {
        for (; lines > 0 && page_ < pages_; --lines) {
            __builtin_prefetch(at_);
            at_ += 64;
            if (at_ >= end_) {
                page_ += value_;
                value_ = !value_;
                start();
            }
        }
    }

private:
    BATON_INLINE void start() {
        if (page_ == pages_) return;
        at_ = (value_ ? task_.values : task_.keys) + task_.pages[page_] * task_.page_stride;
        end_ = at_ + task_.run;
    }

    const DecodeTask &task_;
    int64_t pages_, page_ = 0;
    bool value_ = false;
    const char *at_ = nullptr, *end_ = nullptr;
};

// Where everything lies in the scratch memory, in floats. Rows are query heads.
struct DecodeScratch {
    int64_t tiles, query, queries, scores, weights, sums, maxima, totals, end;

    BATON_INLINE DecodeScratch(int64_t rows, int64_t head_dim) {
        tiles = head_dim / kHalves;
        query = tiles * 4 * kLanes;
        queries = 0;
        scores = queries + rows * query;
        weights = scores + kDecodeRows * kDecodeKeys;
        sums = weights + kDecodeRows * kDecodeKeys / 2;
        maxima = sums + rows * head_dim;
        totals = maxima + round_up(rows, kLanes);
        end = totals + rows * kLanes;
    }
};

// A query's words in the order in which `decode_scores` has those of keys: vector (t, c) has word 16 t + 4 l + c all over
// its lane l of 128 bits.
inline void spread_query(const uint16_t *query, int64_t tiles, uint32_t *out) {
    for (int64_t t = 0; t < tiles; ++t)
        for (int64_t c = 0; c < 4; ++c)
            for (int64_t i = 0; i < kLanes; ++i)
                __builtin_memcpy(out + (t * 4 + c) * kLanes + i, query + (t * kLanes + i / 4 * 4 + c) * 2, 4);
}

BATON_INLINE __m512 add_lanes(__m512 a, __m512 b) {
    return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xDD));
}

// Products of G queries, `query` floats apart, with 16 keys. Keys are transposed by four times four words only: lanes of
// 128 bits then hold different words of the same four keys, and are added up at the end.
template <int G>
BATON_INLINE void decode_scores(const float *queries, int64_t query, const char *const *rows, int64_t offset,
                                int64_t tiles, float *scores, PagesAhead &ahead) {
    __m512 parts[G][4];
    for (int four = 0; four < 4; ++four) {
        for (int g = 0; g < G; ++g) parts[g][four] = _mm512_setzero_ps();
        for (int64_t t = 0; t < tiles; ++t) {
            __m512i row[4], pair[4], word[4];
            for (int i = 0; i < 4; ++i) row[i] = _mm512_loadu_si512(rows[four * 4 + i] + offset + t * 64);
            pair[0] = _mm512_unpacklo_epi32(row[0], row[1]);
            pair[1] = _mm512_unpackhi_epi32(row[0], row[1]);
            pair[2] = _mm512_unpacklo_epi32(row[2], row[3]);
            pair[3] = _mm512_unpackhi_epi32(row[2], row[3]);
            word[0] = _mm512_unpacklo_epi64(pair[0], pair[2]);
            word[1] = _mm512_unpackhi_epi64(pair[0], pair[2]);
            word[2] = _mm512_unpacklo_epi64(pair[1], pair[3]);
            word[3] = _mm512_unpackhi_epi64(pair[1], pair[3]);
            for (int g = 0; g < G; ++g)
                for (int c = 0; c < 4; ++c)
                    parts[g][four] = _mm512_dpbf16_ps(
                        parts[g][four], (__m512bh)word[c],
                        (__m512bh)_mm512_load_si512(queries + g * query + (t * 4 + c) * kLanes));
            ahead.ask(4);
        }
    }
    for (int g = 0; g < G; ++g)
        _mm512_store_ps(scores + g * kDecodeKeys,
                        add_lanes(add_lanes(parts[g][0], parts[g][1]), add_lanes(parts[g][2], parts[g][3])));
}

// sums[G, C * 32] += weights[G, keys] * values. Values of neighbouring keys are paired within lanes of 128 bits: `decode`
// puts the dimensions in order at the end.
template <int G, int C>
BATON_INLINE void decode_values(const uint16_t *weights, const char *const *rows, int64_t offset, int64_t keys,
                                float *sums, int64_t head_dim, PagesAhead &ahead) {
    __m512 totals[G][2 * C];
    for (int g = 0; g < G; ++g)
        for (int c = 0; c < 2 * C; ++c) totals[g][c] = _mm512_load_ps(sums + g * head_dim + c * kLanes);
    for (int64_t k = 0; k < keys; k += 2) {
        __m512bh pairs[2 * C];
        for (int c = 0; c < C; ++c) {
            const __m512i even = _mm512_loadu_si512(rows[k] + offset + c * 64);
            const __m512i odd = _mm512_loadu_si512(rows[k + 1] + offset + c * 64);
            pairs[2 * c] = (__m512bh)_mm512_unpacklo_epi16(even, odd);
            pairs[2 * c + 1] = (__m512bh)_mm512_unpackhi_epi16(even, odd);
        }
        for (int g = 0; g < G; ++g) {
            int32_t pair;
            __builtin_memcpy(&pair, weights + g * kDecodeKeys + k, 4);
            const __m512bh both = (__m512bh)_mm512_set1_epi32(pair);
            for (int c = 0; c < 2 * C; ++c) totals[g][c] = _mm512_dpbf16_ps(totals[g][c], both, pairs[c]);
        }
        ahead.ask(2 * C);
    }
    for (int g = 0; g < G; ++g)
        for (int c = 0; c < 2 * C; ++c) _mm512_store_ps(sums + g * head_dim + c * kLanes, totals[g][c]);
}

// The next `count` keys of the query heads `first` on. Pointers go on to a multiple of 16 and repeat the last one.
template <int G>
void decode_rows(const DecodeTask &task, const DecodeScratch &at, float *floats, int64_t first, const char *const *keys,
                 const char *const *values, int64_t offset, int64_t count, PagesAhead &ahead) {
    const int64_t padded = round_up(count, kLanes);
    float *scores = floats + at.scores, *sums = floats + at.sums + first * task.head_dim;
    uint16_t *weights = reinterpret_cast<uint16_t *>(floats + at.weights);
    for (int64_t k = 0; k < padded; k += kLanes)
        decode_scores<G>(floats + at.queries + first * at.query, at.query, keys + k, offset, at.tiles, scores + k,
                         ahead);
    // Weights are powers of two: exp(x) = 2^(x log2 e).
    const float scale = task.scale * 1.44269504f;
    for (int g = 0; g < G; ++g) {
        float *row = scores + g * kDecodeKeys;
        for (int64_t k = count; k < padded; ++k) row[k] = -__builtin_inff();
        Vector best = Float32::load(row);
        for (int64_t k = kLanes; k < padded; k += kLanes) best = larger(best, Float32::load(row + k));
        const float before = floats[at.maxima + first + g], block = largest(best) * scale;
        const float now = block > before ? block : before;
        float *total = floats + at.totals + (first + g) * kLanes;
        if (now != before) {
            const Vector factor = broadcast(exp2(broadcast(before - now))[0]);
            Float32::store(total, Float32::load(total) * factor);
            for (int64_t d = 0; d < task.head_dim; d += kLanes)
                Float32::store(sums + g * task.head_dim + d, Float32::load(sums + g * task.head_dim + d) * factor);
            floats[at.maxima + first + g] = now;
        }
        Vector whole = Float32::load(total);
        for (int64_t k = 0; k < padded; k += kLanes) {
            const Vector power = exp2(Float32::load(row + k) * scale - now);
            Bfloat16::store(weights + g * kDecodeKeys + k, power);
            whole += power;
        }
        Float32::store(total, whole);
    }
    int64_t d = 0;
    for (; d + 2 * kHalves <= task.head_dim; d += 2 * kHalves)
        decode_values<G, 2>(weights, values, offset + d * 2, padded, sums + d, task.head_dim, ahead);
    for (; d < task.head_dim; d += kHalves)
        decode_values<G, 1>(weights, values, offset + d * 2, padded, sums + d, task.head_dim, ahead);
}

inline int64_t decode_scratch(int64_t rows, int64_t head_dim, bool bfloat16) {
    return bfloat16 && head_dim % kHalves == 0 ? DecodeScratch(rows, head_dim).end * 4 : 0;
}

inline void decode(const DecodeTask &task, void *memory) {
    const int64_t rows = task.heads * task.group;
    const DecodeScratch at(rows, task.head_dim);
    float *floats = static_cast<float *>(memory);
    for (int64_t r = 0; r < rows; ++r) {
        spread_query(static_cast<const uint16_t *>(task.query) + r * task.head_dim, at.tiles,
                     static_cast<uint32_t *>(memory) + at.queries + r * at.query);
        floats[at.maxima + r] = -__builtin_inff();
    }
    __builtin_memset(floats + at.sums, 0, static_cast<std::size_t>(rows * task.head_dim) * 4);
    __builtin_memset(floats + at.totals, 0, static_cast<std::size_t>(rows * kLanes) * 4);

    PagesAhead ahead(task);
    ahead.ask(kDecodeKeys * 2 * task.heads * at.tiles);
    for (int64_t start = 0; start < task.context; start += kDecodeKeys) {
        const int64_t count = task.context - start < kDecodeKeys ? task.context - start : kDecodeKeys;
        const char *keys[kDecodeKeys], *values[kDecodeKeys];
        int64_t page = start / task.page_size, place = start % task.page_size;
        for (int64_t k = 0; k < kDecodeKeys; ++k) {
            if (k >= count) {
                keys[k] = keys[k - 1];
                values[k] = values[k - 1];
                continue;
            }
            const int64_t byte = task.pages[page] * task.page_stride + place * task.token_stride;
            keys[k] = task.keys + byte;
            values[k] = task.values + byte;
            if (++place == task.page_size) place = 0, ++page;
        }
        for (int64_t head = 0; head < task.heads; ++head) {
            const int64_t parts = (task.group + kDecodeRows - 1) / kDecodeRows, offset = head * task.head_stride;
            for (int64_t part = 0; part < parts; ++part) {
                const int64_t first = task.group * part / parts, row = head * task.group + first;
                switch (task.group * (part + 1) / parts - first) {
#define BATON_ROWS(number)                                                              \
    case number:                                                                        \
        decode_rows<number>(task, at, floats, row, keys, values, offset, count, ahead); \
        break;
                    BATON_ROWS(1)
                    BATON_ROWS(2)
                    BATON_ROWS(3)
                    BATON_ROWS(4)
                    BATON_ROWS(5)
                    BATON_ROWS(6)
#undef BATON_ROWS
                }
            }
        }
    }

    for (int64_t r = 0; r < rows; ++r) {
        const float factor = 1.0f / sum(Float32::load(floats + at.totals + r * kLanes));
        uint16_t *out = static_cast<uint16_t *>(task.out) + r * task.head_dim;
        for (int64_t d = 0; d < task.head_dim; d += kHalves) {
            const __m512 low = _mm512_load_ps(floats + at.sums + r * task.head_dim + d);
            const __m512 high = _mm512_load_ps(floats + at.sums + r * task.head_dim + d + kLanes);
            const __m512 first = _mm512_shuffle_f32x4(low, high, 0x44), second = _mm512_shuffle_f32x4(low, high, 0xEE);
            Bfloat16::store(out + d, (Vector)_mm512_shuffle_f32x4(first, first, 0xD8) * factor);
            Bfloat16::store(out + d + kLanes, (Vector)_mm512_shuffle_f32x4(second, second, 0xD8) * factor);
        }
    }
}

#else

inline int64_t decode_scratch(int64_t, int64_t, bool) { return 0; }

inline void decode(const DecodeTask &, void *) {}

#endif

}  // namespace baton::kernels::BATON_ISA
