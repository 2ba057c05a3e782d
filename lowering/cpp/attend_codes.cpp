// Attention of one token of each sample of a cache, whose pools are contiguous. codes.h comes ahead,
// and KEY_WINDOW and VALUE_WINDOW, slots of the windows of keys and of values behind sinks, are defined.
namespace {

// pools: [samples, heads, room of each, its bytes of a page]. rings: [samples, heads, SINKS + slots, HEAD]. news:
// [samples, heads, 1, HEAD], behind n tokens.
struct Cache {
    const uint8_t* pools[6];
    int64_t room[6], bytes[6];
    const Token *key_ring, *value_ring, *key_new, *value_new;
    int64_t heads, n;
};

struct Stored {
    const Cache& cache;
    int64_t head;  // among those of all samples

    const uint8_t* pool(int which, int64_t page) const {
        return cache.pools[which] + (head * cache.room[which] + page) * cache.bytes[which];
    }

    const Token* exact(const Token* ring, const Token* present, int64_t window, int64_t token) const {
        if (token >= cache.n) return present + head * HEAD;
        const int64_t slot = token < SINKS ? token : SINKS + (token - SINKS) % window;
        return ring + (head * (SINKS + window) + slot) * HEAD;
    }

    const Token* key(int64_t token) const { return exact(cache.key_ring, cache.key_new, KEY_WINDOW, token); }
    const Token* value(int64_t token) const { return exact(cache.value_ring, cache.value_new, VALUE_WINDOW, token); }
    const Token* key_sink(int64_t token) const { return key(token); }
    const Token* value_sink(int64_t token) const { return value(token); }
};

struct Samples {
    const Cache& cache;

    Stored operator()(int64_t b, int64_t head) const { return {cache, b * cache.heads + head}; }
};

}  // namespace

// All samples have as many tokens: n, and one of now, if it is present.
extern "C" void kernel(
    const uint8_t* q, uint8_t* out, const uint8_t* key_codes, const uint8_t* key_scales, const uint8_t* key_zeros,
    const uint8_t* value_codes, const uint8_t* value_scales, const uint8_t* value_zeros, const uint8_t* key_ring,
    const uint8_t* value_ring, const uint8_t* key_new, const uint8_t* value_new, int64_t many, int64_t heads, int64_t n,
    int64_t present, int64_t packed, int64_t half, int64_t key_codes_room, int64_t key_scales_room,
    int64_t key_zeros_room, int64_t value_codes_room, int64_t value_scales_room, int64_t value_zeros_room,
    int64_t threads, float scale
) {
    constexpr int64_t KEY_CODES = PAGE * KEY_BITS / 8 * HEAD, VALUE_CODES = PAGE * VALUE_BITS / 8 * HEAD;
    constexpr int64_t KEY_PARAMS = HEAD * sizeof(Scale), VALUE_PARAMS = PAGE * GROUPS * sizeof(Scale);
    const Cache cache = {
        {key_codes, key_scales, key_zeros, value_codes, value_scales, value_zeros},
        {key_codes_room, key_scales_room, key_zeros_room, value_codes_room, value_scales_room, value_zeros_room},
        {KEY_CODES, KEY_PARAMS, KEY_PARAMS, VALUE_CODES, VALUE_PARAMS, VALUE_PARAMS},
        (const Token*)key_ring, (const Token*)value_ring, (const Token*)key_new, (const Token*)value_new, heads, n,
    };
    const std::vector<int64_t> totals(many, n + present), of_both(many, packed), of_keys(many, half);
    attend_all(
        (const Token*)q, scale, (Token*)out, totals.data(), of_both.data(), of_keys.data(), many, heads, Samples{cache},
        threads
    );
}
