// Draws a token from logits. Included by isa.hpp only.
//
// Truncation needs no sort. The least weight that top-k leaves is found by bisection. top-p is by rejection: draw from
// what is left; a token is inside if the tokens that are more likely weigh less than p; otherwise drop it and all that
// are no more likely, and draw again. That is exact.
#pragma once

namespace baton::kernels::BATON_ISA {

// Inverse-CDF search runs over sums of blocks, in double precision, then inside one block.
constexpr int64_t kDrawBlock = 256;

// How many of the weights [padded] are above `floor`, and in `blocks` what those of each block sum up to; the sum of all.
inline double sum_above(const float *weights, int64_t padded, float floor, double *blocks, int64_t *count) {
    double total = 0;
    Integers above{};
    for (int64_t start = 0; start < padded; start += kDrawBlock) {
        Vector sums{};
        for (int64_t i = start; i < start + kDrawBlock; i += kLanes) {
            const Vector value = Float32::load(weights + i);
            const Integers mask = value > broadcast(floor);
            sums += (Vector)((Integers)value & mask);
            above -= mask;
        }
        blocks[start / kDrawBlock] = static_cast<double>(sum(sums));
        total += blocks[start / kDrawBlock];
    }
    *count = 0;
    for (int lane = 0; lane < kLanes; ++lane) *count += above[lane];
    return total;
}

inline int64_t count_at_least(const float *weights, int64_t padded, float floor) {
    Integers found{};
    for (int64_t i = 0; i < padded; i += kLanes) found -= Float32::load(weights + i) >= broadcast(floor);
    int64_t count = 0;
    for (int lane = 0; lane < kLanes; ++lane) count += found[lane];
    return count;
}

// The kth largest of the weights, none of them negative, the largest 1: bisection over the bit patterns of floats, which
// are in the order of the numbers; at the end only over those that are left. `count`: weights that are no smaller.
inline float kth_largest(const float *weights, int64_t padded, int64_t k, float *candidates, int64_t *count) {
    int32_t low = 0, high = 0x3F800001;
    float floor = 0;
    *count = padded;
    while (*count != k && high - low > 1) {
        const int32_t middle = low + (high - low) / 2;
        __builtin_memcpy(&floor, &middle, 4);
        const int64_t found = count_at_least(weights, padded, floor);
        if (found < k) {
            high = middle;
            continue;
        }
        low = middle;
        *count = found;
        if (padded > 16 * kDrawBlock && found <= 8 * kDrawBlock) {
            int64_t kept = 0;
            for (int64_t i = 0; i < padded; ++i) {
                candidates[kept] = weights[i];
                kept += weights[i] >= floor;
            }
            padded = round_up(kept, kLanes);
            for (int64_t i = kept; i < padded; ++i) candidates[i] = -1;
            weights = candidates;
        }
    }
    __builtin_memcpy(&floor, &low, 4);
    return floor;
}

// The token at the share `number` of the mass of the weights above `floor`, in order of ids. `blocks`: their sums.
inline int64_t at_share(const float *weights, int64_t padded, float floor, const double *blocks, double total,
                        double number) {
    double target = number * total;
    int64_t block = -1;
    for (int64_t i = 0; i < padded / kDrawBlock; ++i) {
        if (blocks[i] <= 0) continue;
        block = i;
        if (target < blocks[i]) break;
        target -= blocks[i];
    }
    // Rounding may put a target past the end; the last weight is meant then.
    int64_t token = -1;
    for (int64_t i = block * kDrawBlock; i < (block + 1) * kDrawBlock; ++i) {
        if (weights[i] <= floor) continue;
        token = i;
        target -= static_cast<double>(weights[i]);
        if (target < 0) break;
    }
    return token;
}

inline int64_t draw(const float *logits, int64_t size, const Draw &wanted, float *weights, double *blocks) {
    Vector best = broadcast(-__builtin_inff());
    Integers unordered{};
    int64_t i = 0;
    for (; i + kLanes <= size; i += kLanes) {
        const Vector value = Float32::load(logits + i);
        best = larger(value, best);
        unordered |= value != value;
    }
    float most = largest(best);
    bool bad = false;
    for (int lane = 0; lane < kLanes; ++lane) bad |= unordered[lane] != 0;
    for (; i < size; ++i) {
        bad |= logits[i] != logits[i];
        most = logits[i] > most ? logits[i] : most;
    }
    if (bad || __builtin_fabsf(most) > 3.4028235e38f) return -1;
    if (wanted.temperature <= 0) {
        for (i = 0; i + kLanes <= size; i += kLanes) {
            const Integers mask = Float32::load(logits + i) == broadcast(most);
            bool any = false;
            for (int lane = 0; lane < kLanes; ++lane) any |= mask[lane] != 0;
            if (any) break;
        }
        while (logits[i] != most) ++i;
        return i;
    }

    // The difference before the quotient: both are exact enough for the best token, whose weight is 1.
    const float scale = 1.44269504f / wanted.temperature;
    const int64_t padded = round_up(size, kDrawBlock);
    for (i = 0; i + kLanes <= size; i += kLanes)
        Float32::store(weights + i, exp2((Float32::load(logits + i) - most) * scale));
    for (; i < size; ++i) weights[i] = exp2(broadcast((logits[i] - most) * scale))[0];
    for (; i < padded; ++i) weights[i] = 0;

    const bool cut_k = wanted.top_k > 0 && wanted.top_k < size, cut_p = wanted.top_p < 1;
    float floor = 0;
    int64_t count, ties = 0;
    if (cut_k) {
        // Draws begin with what top-k leaves, ties for the last place included.
        const float least = kth_largest(weights, padded, wanted.top_k, weights + padded, &count);
        int32_t bits;
        __builtin_memcpy(&bits, &least, 4);
        ties = count - wanted.top_k;
        if (bits > 0) --bits;
        __builtin_memcpy(&floor, &bits, 4);
    }
    double total = sum_above(weights, padded, floor, blocks, &count);
    const double mass = total - static_cast<double>(ties) * static_cast<double>(floor);
    for (uint64_t attempt = 0;; ++attempt) {
        const int64_t token =
            at_share(weights, padded, floor, blocks, total, uniform(wanted.seed, wanted.position, attempt));
        if (!cut_k && !cut_p) return token;
        floor = weights[token];
        total = sum_above(weights, padded, floor, blocks, &count);
        if (!(cut_k && count >= wanted.top_k) && !(cut_p && total >= wanted.top_p * mass)) return token;
    }
}

}  // namespace baton::kernels::BATON_ISA
