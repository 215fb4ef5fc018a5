// Attention of one forward pass over a paged cache of keys and values: plans once, runs layer by layer.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels.hpp"

namespace baton::kernels {

struct CacheShape {
    int64_t kv_heads;
    int64_t page_size;
    int64_t head_dim;
    bool tokens_first;  // NHD: a token's heads lie side by side; HND: a head's tokens
    bool bfloat16;
};

class AttentionStep {
public:
    // `tables[i]`: pages of sequence i, enough for its context; all numbers have been checked.
    AttentionStep(CacheShape shape, int64_t heads, const std::vector<int64_t> &query_lens,
                  const std::vector<int64_t> &context_lens, const std::vector<std::vector<int32_t>> &tables, int threads);

    // Stores the new entries of a layer, clears what lies behind them in the pages that they begin, then attends.
    // `cache`: the layer's first page. `queries`: [N, heads, head_dim], `entries`: [N, 2, kv_heads, head_dim], rows
    // `*_stride` elements apart; `out`: [N, heads, head_dim].
    void run(void *cache, const void *queries, int64_t query_stride, const void *entries, int64_t entry_stride,
             void *out) const;

private:
    struct Band {
        int64_t sequence, first_token, tokens;
    };

    void store(char *cache, const char *entries, int64_t entry_stride) const;
    // Brings a sequence's pages nearer.
    void touch(const char *cache, int64_t sequence) const;
    void attend(char *cache, const char *queries, int64_t query_stride, char *out, const Band &band, int64_t head) const;
    // Key-value heads `part * decode_heads_` on of a sequence with one new token.
    void decode(const char *cache, const char *queries, int64_t query_stride, char *out, int64_t sequence,
                int64_t part) const;

    CacheShape shape_;
    int64_t heads_, element_, page_stride_, plane_stride_, head_stride_, token_stride_;
    std::vector<int64_t> starts_, query_lens_, context_lens_;
    std::vector<std::vector<int32_t>> tables_;
    std::vector<Band> bands_;
    std::vector<int64_t> decodes_;
    int64_t decode_heads_;
    int threads_;
};

}  // namespace baton::kernels
