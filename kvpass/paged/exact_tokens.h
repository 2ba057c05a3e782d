// The exact tokens of one head of a request: sinks in its first block, and the window. Needs tokens.h.
namespace {

struct ExactMemory {
    const uint8_t *key_sinks, *value_sinks, *window;
    int64_t block, sink_head;  // strides in bytes: from block to block, and from the sinks of one head to those of the next
    int64_t window_block, window_head, window_place, window_size;  // window_size: tokens per block of the window
};

// blocks, window: the request's blocks, and those of its window.
struct ExactTokens {
    const ExactMemory& memory;
    const int64_t *blocks, *window;
    int64_t head;

    const Token* key(int64_t token) const {
        const int64_t size = memory.window_size, block = window[token / size];
        return (const Token*)memory.window + block * memory.window_block + head * memory.window_head +
               token % size * memory.window_place;
    }

    const Token* value(int64_t token) const { return key(token) + HEAD; }

    const Token* sink(const uint8_t* sinks, int64_t token) const {
        return (const Token*)(sinks + blocks[0] * memory.block + head * memory.sink_head) + token * HEAD;
    }

    const Token* key_sink(int64_t token) const { return sink(memory.key_sinks, token); }
    const Token* value_sink(int64_t token) const { return sink(memory.value_sinks, token); }
};

}  // namespace
