// Attention of a few query tokens per sample, for caches with contiguous pools. Needs attend_parts.h and rings.h.
namespace {

// The six pools of a cache, [samples, heads, room[i], Codes::BYTES[i]].
struct Pools {
    const uint8_t* of[6];
    int64_t room[6];
};

struct Stored : Exact, ReadBy {
    const Pools& pools;

    const uint8_t* pool(int which, int64_t page) const {
        return pools.of[which] + (head * pools.room[which] + page) * Codes::BYTES[which];
    }
};

struct Samples {
    const Pools& pools;
    const Rings& rings;
    const Reading& reading;
    int64_t heads, queries;

    Stored operator()(int64_t b, int64_t head) const {
        const int64_t own = b * heads + head;
        return {{rings, own}, {reading, own * queries}, pools};
    }
};

}  // namespace

// All samples have the same number of tokens: n stored ones, and present ones of the call. Of each KV head there are
// queries queries, of tokens tokens; if causal is 1, these are the present ones, and see each other as such. given,
// key_points and so on: see Reading. slots: see Rings, used if with_slots is 1. For the mask and sinks see tokens.h.
extern "C" void kernel(
    const uint8_t* q, uint8_t* out, const uint8_t* key_codes, const uint8_t* key_scales, const uint8_t* key_zeros,
    const uint8_t* value_codes, const uint8_t* value_scales, const uint8_t* value_zeros, const uint8_t* key_ring,
    const uint8_t* value_ring, const uint8_t* key_new, const uint8_t* value_new, const float* key_points,
    const float* value_points, const float* to_codes, const float* from_codes, const uint8_t* center,
    const int64_t* slots, int64_t samples, int64_t heads, int64_t n, int64_t present, int64_t packed, int64_t key_pages,
    int64_t key_codes_room, int64_t key_scales_room, int64_t key_zeros_room, int64_t value_codes_room,
    int64_t value_scales_room, int64_t value_zeros_room, int64_t with_slots, int64_t given, int64_t queries,
    int64_t tokens, int64_t causal,
    const uint8_t* mask, int64_t mask_kind, int64_t mask_of_sample, int64_t mask_of_head, int64_t mask_of_token,
    const float* sinks, int64_t with_sinks, float* lse, int64_t with_lse, int64_t threads, float scale
) {
    const Pools pools = {
        {key_codes, key_scales, key_zeros, value_codes, value_scales, value_zeros},
        {key_codes_room, key_scales_room, key_zeros_room, value_codes_room, value_scales_room, value_zeros_room},
    };
    const Rings rings = {
        (const Token*)key_ring, (const Token*)value_ring, (const Token*)key_new, (const Token*)value_new, n, present,
        with_slots ? slots : nullptr, SINKS + packed * PAGE};
    const Reading reading(
        (const Token*)q, scale, samples * heads, queries, given, key_points, value_points, to_codes, from_codes,
        (const Scale*)center, threads
    );
    const Mask of_call = {mask, mask_kind, mask_of_sample, mask_of_head, mask_of_token};
    const std::vector<int64_t> totals(samples, n + present), of_both(samples, packed), of_keys(samples, key_pages);
    attend_all(
        (const Token*)q, scale, (Token*)out, totals.data(), of_both.data(), of_keys.data(), samples, heads,
        Samples{pools, rings, reading, heads, queries}, threads,
        {queries, tokens, causal, of_call, with_sinks ? sinks : nullptr, with_lse ? lse : nullptr}
    );
}
