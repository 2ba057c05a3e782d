// Attention over a server's blocks, of one query token for each of many requests, for keys and values with calibrated bit
// widths (kvpass/codec/shares.py). Needs allocated_parts.h and exact_tokens.h.
namespace {

// Where pages are.
struct PageMemory {
    int64_t block, slot;  // strides in bytes
    int64_t slots, lead;  // slots per block, and slots of the first block without a page
};

// The pages of keys, or of values, of a request. Each has all heads, and is followed by at least LANES bytes.
struct Pages {
    const uint8_t* pool;
    const PageMemory& memory;
    const int64_t* blocks;

    const uint8_t* operator()(int64_t page) const {
        const int64_t at = page + memory.lead;
        return pool + blocks[at / memory.slots] * memory.block + at % memory.slots * memory.slot;
    }
};

struct Values {
    Pages pages;
    int64_t room = 0;  // not used
};

}  // namespace

// Of each of samples requests a number of tokens, in total, of which packed pages are packed, and a row of blocks and of
// window_blocks. cos, sin: [pages, pairs], the rotations of the middle tokens of pages; relative_cos, relative_sin:
// [pairs, PAGE / 2], those of the tokens before the middle, relative to it; pairs = 0 means that keys are not
// page-relative. center: [heads, HEAD]. basis: [heads, HEAD, BLOCK]. The rest is
// `ExactMemory` and `PageMemory`.
extern "C" void kernel(
    const uint8_t* q, uint8_t* out, const int64_t* total, const int64_t* packed, const int64_t* blocks,
    const int64_t* window_blocks, const uint8_t* key_pages, const uint8_t* value_pages, const uint8_t* key_sinks,
    const uint8_t* value_sinks, const uint8_t* window, const uint8_t* key_basis, const keys::Fields* key_fields,
    const int32_t* key_share, const uint8_t* value_basis, const values::Fields* value_fields,
    const int32_t* value_share, const uint8_t* center, const float* cos, const float* sin, const float* relative_cos,
    const float* relative_sin, const float* table, int64_t samples, int64_t heads, int64_t blocks_row,
    int64_t window_row, int64_t block, int64_t slot, int64_t slots, int64_t lead, int64_t sink_head,
    int64_t window_block, int64_t window_head, int64_t window_place, int64_t window_size, int64_t pairs,
    int64_t interleaved, int64_t threads, float scale
) {
    const ExactMemory exact = {
        key_sinks, value_sinks, window, block, sink_head, window_block, window_head, window_place, window_size};
    const PageMemory memory = {block, slot, slots, lead};
    const int64_t tasks = samples * heads, wanted = threads > 1 ? (3 * threads + tasks - 1) / tasks : 1;
    const int64_t most = *std::max_element(packed, packed + samples);
    const int64_t parts = std::max<int64_t>(1, std::min(wanted, most / 8));
    float padded_cos[HEAD / 2 * keys::BEFORE_MIDDLE] = {}, padded_sin[HEAD / 2 * keys::BEFORE_MIDDLE] = {};
    for (int64_t i = 0; i < pairs; i++)
        for (int t = 0; t < PAGE / 2; t++) {
            padded_cos[i * keys::BEFORE_MIDDLE + t] = relative_cos[i * (PAGE / 2) + t];
            padded_sin[i * keys::BEFORE_MIDDLE + t] = relative_sin[i * (PAGE / 2) + t];
        }
    const keys::PageRope<float> rope = {cos, sin, pairs, (int)pairs, (int)interleaved, padded_cos, padded_sin};
    std::vector<PartResult> found(tasks * parts);
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (threads > 1)
    for (int64_t i = 0; i < tasks * parts; i++) {
        const int64_t h = i / parts, part = i % parts, b = h / heads, head = h % heads;
        const int64_t* own_blocks = blocks + b * blocks_row;
        const ExactTokens request = {exact, own_blocks, window_blocks + b * window_row, head};
        const Pages of_keys = {key_pages, memory, own_blocks};
        float mean[HEAD];
        to_floats<HEAD>((const Scale*)center + head * HEAD, mean);
        const keys::Layout layout(key_share, heads, head);
        const keys::Head transformed(
            (const Scale*)key_basis + head * HEAD * BLOCK, key_fields + head * keys::PLACES_OF_HEAD, table + keys::GAINS,
            layout
        );
        keys::Scorer<float> scorer(transformed, rope, mean);
        Part own((const Token*)q + h * QUERIES * HEAD, scale);
        const auto score = [&](int64_t begin, int64_t end, float* scores, int64_t apart) {
            scorer(own.q, of_keys, 0, begin, end, table, scores, apart);
        };
        const values::Layout of_value(value_share, heads, head);
        const int64_t begin = part * packed[b] / parts, end = (part + 1) * packed[b] / parts;
        own.add_pages(Values{{value_pages, memory, own_blocks}}, of_value, begin, end, table, score);
        if (part + 1 == parts) own.add_exact_tokens(request, packed[b], total[b]);
        found[i].keep(own);
    }
    for (int64_t h = 0; h < tasks; h++) {
        const int64_t head = h % heads;
        merge(
            found.data() + h * parts, parts, (const Scale*)value_basis + head * HEAD * BLOCK,
            value_fields + head * values::PLACES_OF_HEAD, table, (Token*)out + h * QUERIES * HEAD,
            QUERIES, [](int) { return -INFINITY; }
        );
    }
}
