// Attention of one token of each of many requests over a server's blocks. vectors.h comes ahead, and what is defined:
// HEAD channels, QUERIES of a KV head, PAGE tokens with KEY_BITS and VALUE_BITS, GROUP channels of a value that share a
// scale, SINKS exact first tokens, and whether tokens, and scales, are of BFLOAT16 or are floats, and halves.
//
// A part of a context, of a KV head, is read in pieces of at most a page: scores, then weights by the largest score so
// far, then values. Scores are powers of two.
namespace {

constexpr int VECTORS = HEAD / LANES, GROUPS = HEAD / GROUP, AT_ONCE = 16;  // pages of a part

inline Floats read(const float* from) { return load<Floats>(from); }

struct Bfloat16 {
    uint16_t bits;
};

inline Floats read(const Bfloat16* from) {
#if LANES == 16
    return (Floats)_mm512_slli_epi32(_mm512_cvtepu16_epi32(load<__m256i>(from)), 16);
#elif LANES == 8
    return (Floats)_mm256_slli_epi32(_mm256_cvtepu16_epi32(load<__m128i>(from)), 16);
#else
    typedef uint16_t Halves __attribute__((vector_size(2 * LANES)));
    return (Floats)(__builtin_convertvector(load<Halves>(from), Ints) << 16);
#endif
}

#if BFLOAT16
typedef Bfloat16 Token, Scale;
#else
typedef float Token;
typedef _Float16 Scale;

inline Floats read(const Scale* from) {
#if LANES == 16
    return (Floats)_mm512_cvtph_ps(load<__m256i>(from));
#elif LANES == 8
    return (Floats)_mm256_cvtph_ps(load<__m128i>(from));
#else
    typedef Scale Halves __attribute__((vector_size(2 * LANES)));
    return __builtin_convertvector(load<Halves>(from), Floats);
#endif
}
#endif

// Where pages, sinks and the window lie.
struct Memory {
    const uint8_t *key_codes, *key_scales, *key_zeros, *value_codes, *value_scales, *value_zeros;
    const uint8_t *key_sinks, *value_sinks, *window;
    int64_t block, head, slot, slots, lead;  // bytes apart; slots of a block, and those of a first one without a page
    int64_t window_block, window_head, window_place, window_size;
};

// A request, and one of its heads.
struct Request {
    const Memory& memory;
    const int64_t *blocks, *window;
    int64_t head;

    int64_t page(int64_t index) const {
        const int64_t at = index + memory.lead;
        return blocks[at / memory.slots] * memory.block + head * memory.head + at % memory.slots * memory.slot;
    }

    const Token* exact(int64_t token) const {
        const int64_t size = memory.window_size, block = window[token / size];
        return (const Token*)memory.window + block * memory.window_block + head * memory.window_head +
               token % size * memory.window_place;
    }

    int64_t first() const { return blocks[0] * memory.block + head * memory.head; }
};

// What 1 in the codes of a token is worth: they are not shifted.
template <int BITS>
struct Units {
    float of[PAGE];
    constexpr Units() : of() {
        for (int t = 0; t < PAGE; t++) of[t] = 1.0f / (1 << t / (PAGE * BITS / 8) * BITS);
    }
};

struct Part {
    float q[QUERIES * HEAD], scores[QUERIES * PAGE], out[QUERIES * HEAD] = {}, most[QUERIES], sum[QUERIES] = {};
    Floats products[QUERIES * PAGE];  // of each token, to be summed up

    explicit Part(const float* from) {
        for (int i = 0; i < QUERIES * HEAD; i++) q[i] = from[i] / LN_2;
        std::fill(most, most + QUERIES, -INFINITY);
    }

    void score_page(const uint8_t* codes, const Scale* scales, const Scale* zeros) {
        constexpr int PLANES = 8 / KEY_BITS, ROWS = PAGE / PLANES, ONES = (1 << KEY_BITS) - 1;
        static constexpr Units<KEY_BITS> units;
        Floats turned[QUERIES][VECTORS], zero[QUERIES] = {};
        for (int v = 0; v < VECTORS; v++) {
            const Floats scale = read(scales + v * LANES), least = read(zeros + v * LANES);
            for (int r = 0; r < QUERIES; r++) {
                const Floats own = load<Floats>(q + r * HEAD + v * LANES);
                turned[r][v] = own * scale;
                zero[r] += own * least;
            }
        }
        for (int row = 0; row < ROWS; row++) {
            Floats found[PLANES][QUERIES] = {};
            UNROLLED for (int v = 0; v < VECTORS; v++) {
                const Ints some = widened(codes + row * HEAD + v * LANES);
                UNROLLED for (int plane = 0; plane < PLANES; plane++) {
                    const Floats field = numbers(some & ONES << KEY_BITS * plane);
                    UNROLLED for (int r = 0; r < QUERIES; r++) found[plane][r] += field * turned[r][v];
                }
            }
            UNROLLED for (int plane = 0; plane < PLANES; plane++)
                UNROLLED for (int r = 0; r < QUERIES; r++) products[r * PAGE + plane * ROWS + row] = found[plane][r];
        }
        for (int r = 0; r < QUERIES; r++) {
            const float base = total(zero[r]);
            for (int t = 0; t < PAGE; t += LANES)
                store(scores + r * PAGE + t, sums(products + r * PAGE + t) * load<Floats>(units.of + t) + base);
        }
    }

    // key(i): of the i-th of count tokens.
    template <typename Key>
    void score_exact(int count, Key key) {
        for (int t = 0; t < count; t++) {
            const Token* own = key(t);
            for (int r = 0; r < QUERIES; r++) products[r * PAGE + t] = Floats{};
            for (int v = 0; v < VECTORS; v++) {
                const Floats some = read(own + v * LANES);
                for (int r = 0; r < QUERIES; r++)
                    products[r * PAGE + t] += some * load<Floats>(q + r * HEAD + v * LANES);
            }
        }
        for (int r = 0; r < QUERIES; r++)
            for (int t = 0; t < count; t += LANES) store(scores + r * PAGE + t, sums(products + r * PAGE + t));
    }

    // Scores of as many tokens to weights, and what came before scaled to them.
    void weigh(int count) {
        for (int r = 0; r < QUERIES; r++) {
            float *own = scores + r * PAGE, before = most[r];
            for (int t = count; t % LANES; t++) own[t] = -INFINITY;
            const float all = to_weights(own, count, most[r]);
            if (most[r] != before) {
                const float less = exp2(Floats{} + (before - most[r]))[0];
                sum[r] *= less;
                for (float* own = out + r * HEAD; own < out + (r + 1) * HEAD; own += LANES)
                    store(own, load<Floats>(own) * less);
            }
            sum[r] += all;
        }
    }

    void add_page(const uint8_t* codes, const Scale* scales, const Scale* zeros) {
        constexpr int PLANES = 8 / VALUE_BITS, ROWS = PAGE / PLANES, ONES = (1 << VALUE_BITS) - 1;
        static constexpr Units<VALUE_BITS> units;
        float weights[GROUPS][QUERIES][PAGE], all_scales[PAGE * GROUPS], all_zeros[PAGE * GROUPS];
        for (int i = 0; i < PAGE * GROUPS; i += LANES) {
            store(all_scales + i, read(scales + i));
            store(all_zeros + i, read(zeros + i));
        }
        for (int g = 0; g < GROUPS; g++) {
            float scale[PAGE], least[PAGE];
            for (int t = 0; t < PAGE; t++) scale[t] = all_scales[t * GROUPS + g] * units.of[t];
            for (int t = 0; t < PAGE; t++) least[t] = all_zeros[t * GROUPS + g];
            for (int r = 0; r < QUERIES; r++) {
                Floats base = {};
                for (int t = 0; t < PAGE; t += LANES) {
                    const Floats weight = load<Floats>(scores + r * PAGE + t);
                    store(weights[g][r] + t, weight * load<Floats>(scale + t));
                    base += weight * load<Floats>(least + t);
                }
                const float more = total(base);
                float* own = out + r * HEAD + g * GROUP;
                for (int d = 0; d < GROUP; d += LANES) store(own + d, load<Floats>(own + d) + more);
            }
        }
        for (int g = 0; g < GROUPS; g++)
            for (int d = g * GROUP; d < (g + 1) * GROUP; d += LANES) {
                Floats found[QUERIES];
                UNROLLED for (int r = 0; r < QUERIES; r++) found[r] = load<Floats>(out + r * HEAD + d);
                for (int row = 0; row < ROWS; row++) {
                    const Ints some = widened(codes + row * HEAD + d);
                    UNROLLED for (int plane = 0; plane < PLANES; plane++) {
                        const Floats field = numbers(some & ONES << VALUE_BITS * plane);
                        const int t = plane * ROWS + row;
                        UNROLLED for (int r = 0; r < QUERIES; r++) found[r] += field * weights[g][r][t];
                    }
                }
                UNROLLED for (int r = 0; r < QUERIES; r++) store(out + r * HEAD + d, found[r]);
            }
    }

    template <typename Value>
    void add_exact(int count, Value value) {
        for (int d = 0; d < HEAD; d += LANES) {
            Floats found[QUERIES];
            UNROLLED for (int r = 0; r < QUERIES; r++) found[r] = load<Floats>(out + r * HEAD + d);
            for (int t = 0; t < count; t++) {
                const Floats some = read(value(t) + d);
                UNROLLED for (int r = 0; r < QUERIES; r++) found[r] += some * scores[r * PAGE + t];
            }
            UNROLLED for (int r = 0; r < QUERIES; r++) store(out + r * HEAD + d, found[r]);
        }
    }

    void score_keys_of(const Memory& memory, int64_t page) {
        const auto of_keys = [&](const uint8_t* pool) { return (const Scale*)(pool + page); };
        score_page(memory.key_codes + page, of_keys(memory.key_scales), of_keys(memory.key_zeros));
    }

    // Pages whose keys and values are packed.
    void add_pages(const Request& request, int64_t begin, int64_t end) {
        const Memory& memory = request.memory;
        for (int64_t index = begin; index < end; index++) {
            const int64_t page = request.page(index);
            score_keys_of(memory, page);
            weigh(PAGE);
            const auto of_values = [&](const uint8_t* pool) { return (const Scale*)(pool + page); };
            add_page(memory.value_codes + page, of_values(memory.value_scales), of_values(memory.value_zeros));
        }
    }

    // Tokens whose values are exact: those of pages from packed on, whose keys are in them up to half, and sinks.
    void add_others(const Request& request, int64_t packed, int64_t half, int64_t total) {
        const Memory& memory = request.memory;
        for (int64_t page = packed, token = SINKS + packed * PAGE; token < total; page++, token += PAGE) {
            const int count = std::min<int64_t>(PAGE, total - token);
            if (page < half) score_keys_of(memory, request.page(page));
            else score_exact(count, [&](int t) { return request.exact(token + t); });
            weigh(count);
            add_exact(count, [&](int t) { return request.exact(token + t) + HEAD; });
        }
        for (int64_t token = 0; token < std::min<int64_t>(SINKS, total); token += PAGE) {
            const int count = std::min<int64_t>(PAGE, std::min<int64_t>(SINKS, total) - token);
            const int64_t first = request.first();
            const auto in = [&](const uint8_t* sinks) { return (const Token*)(sinks + first) + token * HEAD; };
            score_exact(count, [&](int t) { return in(memory.key_sinks) + t * HEAD; });
            weigh(count);
            add_exact(count, [&](int t) { return in(memory.value_sinks) + t * HEAD; });
        }
    }
};

}  // namespace

// q, out: [many, heads * QUERIES, HEAD]. Of each request: total tokens, packed pages, and half, those whose keys are;
// and a row of blocks and of window. The rest is `Memory`.
extern "C" void kernel(
    const float* q, float* out, const int64_t* total, const int64_t* packed, const int64_t* half, const int64_t* blocks,
    const int64_t* window_blocks, const uint8_t* key_codes, const uint8_t* key_scales, const uint8_t* key_zeros,
    const uint8_t* value_codes, const uint8_t* value_scales, const uint8_t* value_zeros, const uint8_t* key_sinks,
    const uint8_t* value_sinks, const uint8_t* window, int64_t many, int64_t heads, int64_t blocks_row,
    int64_t window_row, int64_t block, int64_t head, int64_t slot, int64_t slots, int64_t lead, int64_t window_block,
    int64_t window_head, int64_t window_place, int64_t window_size, int64_t threads
) {
    const Memory memory = {
        key_codes, key_scales, key_zeros, value_codes, value_scales, value_zeros, key_sinks, value_sinks, window, block,
        head, slot, slots, lead, window_block, window_head, window_place, window_size,
    };
    std::vector<int64_t> request_of, first(many + 1);  // of parts, which are of all heads; the last has the others
    for (int64_t b = 0; b < many; b++) {
        first[b] = request_of.size();
        request_of.insert(request_of.end(), packed[b] / AT_ONCE + 1, b);
    }
    first[many] = request_of.size();
    const int64_t parts = first[many];
    const int64_t rows = parts * heads * QUERIES;
    std::vector<float> outs(rows * HEAD), most(rows), sum(rows);
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (threads > 1)
    for (int64_t i = 0; i < parts * heads; i++) {
        const int64_t part = i / heads, b = request_of[part], begin = (part - first[b]) * AT_ONCE;
        const Request request = {memory, blocks + b * blocks_row, window_blocks + b * window_row, i % heads};
        Part found(q + (b * heads + i % heads) * QUERIES * HEAD);
        found.add_pages(request, begin, std::min(begin + AT_ONCE, packed[b]));
        if (part + 1 == first[b + 1]) found.add_others(request, packed[b], half[b], total[b]);
        std::copy(found.out, found.out + QUERIES * HEAD, outs.data() + i * QUERIES * HEAD);
        std::copy(found.most, found.most + QUERIES, most.data() + i * QUERIES);
        std::copy(found.sum, found.sum + QUERIES, sum.data() + i * QUERIES);
    }
    for (int64_t b = 0; b < many; b++)
        for (int64_t row = 0; row < heads * QUERIES; row++) {
            float high = -INFINITY, all = 0, *own = out + (b * heads * QUERIES + row) * HEAD;
            for (int64_t part = first[b]; part < first[b + 1]; part++)
                high = std::max(high, most[part * heads * QUERIES + row]);
            std::fill(own, own + HEAD, 0.0f);
            for (int64_t part = first[b]; part < first[b + 1]; part++) {
                const int64_t at = part * heads * QUERIES + row;
                const float less = std::exp2(most[at] - high);
                all += sum[at] * less;
                for (int d = 0; d < HEAD; d++) own[d] += outs[at * HEAD + d] * less;
            }
            for (int d = 0; d < HEAD; d++) own[d] /= all;
        }
}
