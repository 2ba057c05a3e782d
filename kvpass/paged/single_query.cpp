// Attention over a server's blocks, of one query token for each of many requests. Needs attend_parts.h
// and exact_tokens.h.
namespace {

// Where pages are.
struct PageMemory {
    const uint8_t* pools[6];
    int64_t block, head, slot;  // strides in bytes
    int64_t slots, lead;  // slots per block, and slots of the first block without a page
};

// One head of a request.
struct Request : ExactTokens, ReadBy {
    const PageMemory& pages;

    const uint8_t* pool(int which, int64_t index) const {
        const int64_t at = index + pages.lead, block = blocks[at / pages.slots];
        return pages.pools[which] + block * pages.block + head * pages.head + at % pages.slots * pages.slot;
    }
};

struct Requests {
    const ExactMemory& memory;
    const PageMemory& pages;
    const Reading& reading;
    const int64_t *blocks, *window;
    int64_t blocks_row, window_row, heads, queries;

    Request operator()(int64_t b, int64_t head) const {
        return {
            {memory, blocks + b * blocks_row, window + b * window_row, head}, {reading, (b * heads + head) * queries},
            pages};
    }
};

}  // namespace

// Of each request a row of blocks and of window; the rest is `ExactMemory`, `PageMemory`, `Reading` and what attend_all
// takes.
extern "C" void kernel(
    const uint8_t* q, uint8_t* out, const int64_t* total, const int64_t* packed, const int64_t* key_pages,
    const int64_t* blocks, const int64_t* window_blocks, const uint8_t* key_codes, const uint8_t* key_scales,
    const uint8_t* key_zeros, const uint8_t* value_codes, const uint8_t* value_scales, const uint8_t* value_zeros,
    const uint8_t* key_sinks, const uint8_t* value_sinks, const uint8_t* window, const float* key_points,
    const float* value_points, const float* to_codes, const float* from_codes, const uint8_t* center, int64_t samples,
    int64_t heads, int64_t blocks_row, int64_t window_row, int64_t block, int64_t head, int64_t slot, int64_t slots,
    int64_t lead, int64_t window_block, int64_t window_head, int64_t window_place, int64_t window_size, int64_t given,
    int64_t queries, int64_t threads, float scale
) {
    const ExactMemory memory = {
        key_sinks, value_sinks, window, block, head, window_block, window_head, window_place, window_size};
    const PageMemory pages = {
        {key_codes, key_scales, key_zeros, value_codes, value_scales, value_zeros}, block, head, slot, slots, lead};
    const Reading reading(
        (const Token*)q, scale, samples * heads, queries, given, key_points, value_points, to_codes, from_codes,
        (const Scale*)center, threads
    );
    const Requests requests = {
        memory, pages, reading, blocks, window_blocks, blocks_row, window_row, heads, queries};
    attend_all((const Token*)q, scale, (Token*)out, total, packed, key_pages, samples, heads, requests, threads,
               {queries, 1, 0});
}
