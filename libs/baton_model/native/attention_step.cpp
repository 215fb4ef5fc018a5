#include "attention_step.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "scratch.hpp"

namespace baton::kernels {

namespace {

// Rows of a task at most. Each task copies the keys that it sees, which costs as much as some six rows do; more tasks
// are more to share among threads.
constexpr int64_t kBandRows = 192;
// A head's rows of a page are short runs, one head's after the other's are all over the memory: 8 GB/s of a core's 35. So
// a decode for which there is no kernel of its own first touches its pages as they lie, every line of them: 2,048 tokens
// of 3 KV heads of 64 in bfloat16, 30 layers, take 3.3 ms instead of 5.9. Every second line is worse than none. What is
// more than this would be gone from the processor's cache before the last head came to it.
constexpr int64_t kLineBytes = 64;
constexpr int64_t kTouchedBytes = 8 << 20;

}  // namespace

AttentionStep::AttentionStep(CacheShape shape, int64_t heads, const std::vector<int64_t> &query_lens,
                             const std::vector<int64_t> &context_lens, const std::vector<std::vector<int32_t>> &tables,
                             int threads)
    : shape_(shape),
      heads_(heads),
      element_(shape.bfloat16 ? 2 : 4),
      page_stride_(2 * shape.kv_heads * shape.page_size * shape.head_dim * element_),
      plane_stride_(page_stride_ / 2),
      head_stride_((shape.tokens_first ? 1 : shape.page_size) * shape.head_dim * element_),
      token_stride_((shape.tokens_first ? shape.kv_heads : 1) * shape.head_dim * element_),
      query_lens_(query_lens),
      context_lens_(context_lens),
      tables_(tables),
      threads_(threads) {
    const int64_t group = heads / shape.kv_heads, most = std::max<int64_t>(kBandRows / group, 1);
    const bool decodes = kernels().decode_scratch(heads, shape.head_dim, shape.bfloat16) > 0;
    int64_t start = 0;
    for (size_t i = 0; i < query_lens.size(); ++i) {
        starts_.push_back(start);
        start += query_lens[i];
        if (decodes && query_lens[i] == 1) {
            decodes_.push_back(static_cast<int64_t>(i));
            continue;
        }
        for (int64_t first = 0; first < query_lens[i]; first += most)
            bands_.push_back({static_cast<int64_t>(i), first, std::min(most, query_lens[i] - first)});
    }
    // The longest first, so that no thread is left with one at the end.
    std::stable_sort(bands_.begin(), bands_.end(), [this](const Band &a, const Band &b) {
        return a.tokens * context_lens_[a.sequence] > b.tokens * context_lens_[b.sequence];
    });
    std::stable_sort(decodes_.begin(), decodes_.end(),
                     [this](int64_t a, int64_t b) { return context_lens_[a] > context_lens_[b]; });
    // All heads of a sequence together read its pages as they lie; apart they are more to share.
    decode_heads_ = threads > 1 && static_cast<int64_t>(decodes_.size()) < 2 * threads ? 1 : shape.kv_heads;
}

void AttentionStep::run(void *cache, const void *queries, int64_t query_stride, const void *entries,
                        int64_t entry_stride, void *out) const {
    char *layer = static_cast<char *>(cache);
    store(layer, static_cast<const char *>(entries), entry_stride);
    const char *from = static_cast<const char *>(queries);
    char *to = static_cast<char *>(out);
    const int64_t splits = shape_.kv_heads / decode_heads_;
    const int64_t bands = static_cast<int64_t>(bands_.size()) * shape_.kv_heads;
    const int64_t tasks = bands + static_cast<int64_t>(decodes_.size()) * splits;
#pragma omp parallel for schedule(dynamic) num_threads(threads_) if (threads_ > 1 && tasks > 1)
    for (int64_t task = 0; task < tasks; ++task)
        if (task < bands)
            attend(layer, from, query_stride, to, bands_[task / shape_.kv_heads], task % shape_.kv_heads);
        else
            decode(layer, from, query_stride, to, decodes_[(task - bands) / splits], (task - bands) % splits);
}

void AttentionStep::store(char *cache, const char *entries, int64_t entry_stride) const {
    const int64_t size = shape_.head_dim * element_;
    for (size_t i = 0; i < tables_.size(); ++i) {
        const int64_t context = context_lens_[i], first = context - query_lens_[i];
        for (int64_t token = first; token < context; ++token) {
            const char *row = entries + (starts_[i] + token - first) * entry_stride * element_;
            char *page = cache + tables_[i][token / shape_.page_size] * page_stride_ +
                         token % shape_.page_size * token_stride_;
            for (int64_t plane = 0; plane < 2; ++plane)
                for (int64_t head = 0; head < shape_.kv_heads; ++head, row += size)
                    std::memcpy(page + plane * plane_stride_ + head * head_stride_, row, static_cast<size_t>(size));
        }
        const int64_t used = context % shape_.page_size;
        if (used == 0 || used > query_lens_[i]) continue;
        char *last = cache + tables_[i][(context - 1) / shape_.page_size] * page_stride_;
        for (int64_t token = used; token < shape_.page_size; ++token)
            for (int64_t plane = 0; plane < 2; ++plane)
                for (int64_t head = 0; head < shape_.kv_heads; ++head)
                    std::memset(last + token * token_stride_ + plane * plane_stride_ + head * head_stride_, 0,
                                static_cast<size_t>(size));
    }
}

void AttentionStep::touch(const char *cache, int64_t sequence) const {
    const int64_t pages = (context_lens_[sequence] + shape_.page_size - 1) / shape_.page_size;
    if (pages * page_stride_ > kTouchedBytes) return;
    for (int64_t i = 0; i < pages; ++i) {
        const volatile char *page = cache + tables_[sequence][i] * page_stride_;
        for (int64_t byte = 0; byte < page_stride_; byte += kLineBytes) static_cast<void>(page[byte]);
    }
}

void AttentionStep::attend(char *cache, const char *queries, int64_t query_stride, char *out, const Band &band,
                           int64_t head) const {
    const int64_t group = heads_ / shape_.kv_heads, first = starts_[band.sequence] + band.first_token;
    if (head == 0 && query_lens_[band.sequence] == 1) touch(cache, band.sequence);
    AttentionTask task;
    task.keys = cache + head * head_stride_;
    task.values = task.keys + plane_stride_;
    task.page_stride = page_stride_;
    task.token_stride = token_stride_;
    task.page_size = shape_.page_size;
    task.pages = tables_[band.sequence].data();
    task.head_dim = shape_.head_dim;
    task.query = queries + (first * query_stride + head * group * shape_.head_dim) * element_;
    task.out = out + (first * heads_ + head * group) * shape_.head_dim * element_;
    task.query_stride = query_stride;
    task.out_stride = heads_ * shape_.head_dim;
    task.group = group;
    task.rows = band.tokens * group;
    task.visible = context_lens_[band.sequence] - query_lens_[band.sequence] + band.first_token + 1;
    task.scale = 1.0f / std::sqrt(static_cast<float>(shape_.head_dim));
    kernels().attend(task, shape_.bfloat16, scratch(kernels().attend_scratch(task.rows, task.head_dim)));
}

void AttentionStep::decode(const char *cache, const char *queries, int64_t query_stride, char *out, int64_t sequence,
                           int64_t part) const {
    const int64_t group = heads_ / shape_.kv_heads, head = part * decode_heads_, size = shape_.head_dim * element_;
    DecodeTask task;
    task.keys = cache + head * head_stride_;
    task.values = task.keys + plane_stride_;
    task.page_stride = page_stride_;
    task.token_stride = token_stride_;
    task.head_stride = head_stride_;
    task.run = (shape_.page_size - 1) * token_stride_ + (decode_heads_ - 1) * head_stride_ + size;
    task.page_size = shape_.page_size;
    task.pages = tables_[sequence].data();
    task.context = context_lens_[sequence];
    task.head_dim = shape_.head_dim;
    task.heads = decode_heads_;
    task.query = queries + starts_[sequence] * query_stride * element_ + head * group * size;
    task.out = out + (starts_[sequence] * heads_ + head * group) * size;
    task.group = group;
    task.scale = 1.0f / std::sqrt(static_cast<float>(shape_.head_dim));
    kernels().decode(task, scratch(kernels().decode_scratch(task.heads * group, task.head_dim, shape_.bfloat16)));
}

}  // namespace baton::kernels
