// The exact tokens of a cache. Needs tokens.h.
//
// Macros: KEY_WINDOW and VALUE_WINDOW: slots of the windows of keys and of values, after the sinks.
namespace {

// keys, values: [samples, heads, SINKS + window, HEAD]. key_new, value_new: [samples, heads, present, HEAD], the tokens
// from n on. slots: where the exact tokens from first on are in the rings; null if these are the newest ones, in order.
struct Rings {
    const Token *keys, *values, *key_new, *value_new;
    int64_t n, present;
    const int64_t* slots = nullptr;
    int64_t first = 0;

    const Token* exact(const Token* ring, const Token* from, int64_t window, int64_t head, int64_t token) const {
        if (token >= n) return from + (head * present + token - n) * HEAD;
        const int64_t slot = token < SINKS ? token : slots ? slots[token - first] : SINKS + (token - SINKS) % window;
        return ring + (head * (SINKS + window) + slot) * HEAD;
    }
};

// The exact tokens of one head. head counts the heads of all samples.
struct Exact {
    const Rings& rings;
    int64_t head;

    const Token* key(int64_t token) const {
        return rings.exact(rings.keys, rings.key_new, KEY_WINDOW, head, token);
    }
    const Token* value(int64_t token) const {
        return rings.exact(rings.values, rings.value_new, VALUE_WINDOW, head, token);
    }
    const Token* key_sink(int64_t token) const { return key(token); }
    const Token* value_sink(int64_t token) const { return value(token); }
};

}  // namespace
