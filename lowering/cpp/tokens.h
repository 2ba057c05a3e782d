// Exact tokens, and the running sums of attention over a part of a context. Needs vectors.h.
//
// Macros: HEAD channels per head, QUERIES queries of a KV head at a time (its query heads or, if a call has several
// tokens, those of any of its tokens), PAGE tokens at a time, SINKS exact first tokens.
// BFLOAT16: tokens and 16-bit parameters of pages are bfloat16; otherwise tokens are float32 and parameters float16.
namespace {

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

inline float number(float x) { return x; }

inline float number(Bfloat16 x) {
    const uint32_t bits = (uint32_t)x.bits << 16;
    float found;
    std::memcpy(&found, &bits, sizeof(found));
    return found;
}

inline void round_to(float& to, float x) { to = x; }

inline void round_to(Bfloat16& to, float x) {  // to nearest, ties to even
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof(bits));
    to.bits = x == x ? (bits + 0x7fff + (bits >> 16 & 1)) >> 16 : 0x7fc0;
}

#if BFLOAT16
typedef Bfloat16 Token, Scale;
#else
typedef float Token;
typedef _Float16 Scale;

inline float number(Scale x) { return x; }

inline void round_to(Scale& to, float x) { to = (Scale)x; }

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

template <int COUNT, typename Stored>
inline void to_floats(const Stored* from, float* to) {
    int i = 0;
    for (; i + LANES <= COUNT; i += LANES) store(to + i, read(from + i));
    for (; i < COUNT; i++) to[i] = number(from[i]);
}

// The mask of a call: for each sample, query head and token of the call a row of all tokens, which are bools (true: may
// attend) or are added to the scores. Strides are in tokens; 0 shares rows.
struct Mask {
    enum Kind { NONE, BOOL, ADDED };

    const uint8_t* rows = nullptr;
    int64_t kind = NONE, of_sample = 0, of_head = 0, of_token = 0;
};

// The row of one query.
struct MaskRow {
    const uint8_t* visible = nullptr;  // null: not bools
    const Token* added = nullptr;      // null: not added

    MaskRow() = default;
    MaskRow(const Mask& mask, int64_t at)
        : visible(mask.kind == Mask::BOOL ? mask.rows + at : nullptr),
          added(mask.kind == Mask::ADDED ? (const Token*)mask.rows + at : nullptr) {}

    bool hides(int64_t first, int count) const {
        return visible && std::all_of(visible + first, visible + first + count, [](uint8_t x) { return !x; });
    }

    // first: the token of the first of count scores. As in torch, the lowest finite number hides nothing if all tokens
    // have it.
    void apply(int64_t first, int count, float* scores) const {
        constexpr float LOWEST = std::numeric_limits<float>::lowest();
        for (int t = 0; visible && t < count; t++)
            if (!visible[first + t]) scores[t] = -INFINITY;
        for (int t = 0; added && t < count; t++) {
            const float more = number(added[first + t]);
            scores[t] = more < LOWEST ? more : std::max(scores[t] + more / LN_2, LOWEST);
        }
    }
};

// Running softmax. Scores are base-2 logarithms, for several tokens at a time; those of query r start at r * apart. They
// are converted to weights relative to the largest score so far.
struct RunningSoftmax {
    alignas(Floats) float q[QUERIES * HEAD];
    alignas(Floats) float out[QUERIES * HEAD] = {};
    float peak[QUERIES], sum[QUERIES] = {};
    Floats products[QUERIES * PAGE];  // per token, before the sum over lanes
    int64_t visible[QUERIES];  // tokens that each query sees, of those added by add_all_exact
    MaskRow masks[QUERIES];

    // queries: how many there are; others are zeros.
    RunningSoftmax(const Token* from, float scale, int queries = QUERIES) {
        for (int i = 0; i < QUERIES * HEAD; i++) q[i] = i < queries * HEAD ? number(from[i]) * (scale / LN_2) : 0;
        std::fill(peak, peak + QUERIES, std::numeric_limits<float>::lowest());
        std::fill(visible, visible + QUERIES, INT64_MAX);
    }

    // Hides what a query does not see of count tokens from first on.
    void hide(int64_t first, int count, float* scores, int apart) const {
        for (int r = 0; r < QUERIES; r++) {
            for (int64_t t = std::max<int64_t>(0, visible[r] - first); t < count; t++) scores[r * apart + t] = -INFINITY;
            masks[r].apply(first, count, scores + r * apart);
        }
    }

    // Whether the mask hides a page of packed tokens from all queries.
    bool hides_page(int64_t page) const {
        return std::all_of(masks, masks + QUERIES, [&](const MaskRow& row) {
            return row.hides(SINKS + page * PAGE, PAGE);
        });
    }

    // key(i): the key of the i-th of count tokens. count is at most PAGE.
    template <typename Key>
    void score_exact(int count, Key key, float* scores, int apart) {
        for (int t = 0; t < count; t++) {
            const Token* own = key(t);
            Floats found[QUERIES] = {};
            UNROLLED for (int v = 0; v < HEAD; v += LANES) {
                const Floats loaded = read(own + v);
                UNROLLED for (int r = 0; r < QUERIES; r++) found[r] += loaded * load<Floats>(q + r * HEAD + v);
            }
            UNROLLED for (int r = 0; r < QUERIES; r++) products[r * PAGE + t] = found[r];
        }
        for (int r = 0; r < QUERIES; r++)
            for (int t = 0; t < count; t += LANES) store(scores + r * apart + t, sums(products + r * PAGE + t));
    }

    // Converts the scores of count tokens to weights, and rescales earlier sums to match. rescaled(r, rescale) is called
    // if sums of query r are multiplied by rescale.
    template <typename Rescaled>
    void weigh(int count, float* scores, int apart, Rescaled rescaled) {
        for (int r = 0; r < QUERIES; r++) {
            float *own = scores + r * apart, before = peak[r];
            for (int t = count; t % LANES; t++) own[t] = -INFINITY;
            const float all = to_weights(own, count, peak[r]);
            if (peak[r] != before) {
                const float rescale = exp2(Floats{} + (before - peak[r]))[0];
                sum[r] *= rescale;
                for (float* own = out + r * HEAD; own < out + (r + 1) * HEAD; own += LANES)
                    store(own, load<Floats>(own) * rescale);
                rescaled(r, rescale);
            }
            sum[r] += all;
        }
    }

    template <typename Value>
    void add_exact(int count, Value value, const float* scores, int apart) {
        for (int d = 0; d < HEAD; d += LANES) {
            Floats found[QUERIES];
            UNROLLED for (int r = 0; r < QUERIES; r++) found[r] = load<Floats>(out + r * HEAD + d);
            for (int t = 0; t < count; t++) {
                const Floats loaded = read(value(t) + d);
                UNROLLED for (int r = 0; r < QUERIES; r++) found[r] += loaded * scores[r * apart + t];
            }
            UNROLLED for (int r = 0; r < QUERIES; r++) store(out + r * HEAD + d, found[r]);
        }
    }

    // Adds the tokens whose keys and values are exact: the sinks, and those from first on. context has functions
    // key(token), value(token), key_sink(token) and value_sink(token). scores has room for PAGE tokens per query.
    template <typename Context, typename Rescaled>
    void add_all_exact(
        const Context& context, int64_t first, int64_t total, float* scores, int apart, Rescaled rescaled
    ) {
        const int64_t sinks = std::min<int64_t>(SINKS, total);
        for (int64_t token = 0; token < sinks; token += PAGE) {
            const int count = std::min<int64_t>(PAGE, sinks - token);
            score_exact(count, [&](int t) { return context.key_sink(token + t); }, scores, apart);
            hide(token, count, scores, apart);
            weigh(count, scores, apart, rescaled);
            add_exact(count, [&](int t) { return context.value_sink(token + t); }, scores, apart);
        }
        for (int64_t token = first; token < total; token += PAGE) {
            const int count = std::min<int64_t>(PAGE, total - token);
            score_exact(count, [&](int t) { return context.key(token + t); }, scores, apart);
            hide(token, count, scores, apart);
            weigh(count, scores, apart, rescaled);
            add_exact(count, [&](int t) { return context.value(token + t); }, scores, apart);
        }
    }
};

// A sum of values over the sum of its weights, the largest of which is 1. It is far less if the query sees no token.
inline float attended(float values, float weights) { return weights < 0.5f ? 0 : values / weights; }

// The log-sum-exp of scores whose weights, relative to the score peak, have the sum weights. Scores are base-2 logarithms,
// but for the lowest finite number, which hides tokens.
inline float log_sum_exp(float peak, float weights) {
    if (weights < 0.5f) return -INFINITY;
    return peak == std::numeric_limits<float>::lowest() ? peak : (peak + std::log2(weights)) * (float)LN_2;
}

// The queries of a KV head: its query heads and, of each, the tokens of the call. They are processed in blocks of QUERIES.
struct Queries {
    int64_t count, tokens, causal;
    Mask mask = {};
    const float* sinks = nullptr;  // a logit of each query head, which joins its softmax without a value; null for none
    float* lse = nullptr;          // where the log-sum-exp of each query goes, [samples, heads, count]; null for nowhere

    int64_t blocks() const { return (count + QUERIES - 1) / QUERIES; }
    int64_t in_block(int64_t block) const { return std::min<int64_t>(QUERIES, count - block * QUERIES); }

    // The query head of a query of a KV head.
    int64_t head_of(int64_t head, int64_t query) const { return head * (count / tokens) + query / tokens; }

    // The score of the sink of a query of a KV head.
    float sink(int64_t head, int64_t query) const { return sinks ? sinks[head_of(head, query)] / LN_2 : -INFINITY; }

    // The running softmax of a block of a KV head. all: the number of all tokens, those of the call included.
    template <typename Part>
    Part start(const Token* q, int64_t sample, int64_t head, int64_t block, int64_t all, float scale) const {
        Part part(q + block * QUERIES * HEAD, scale, in_block(block));
        for (int r = 0; mask.kind && r < QUERIES; r++) {
            const int64_t own = block * QUERIES + std::min<int64_t>(r, in_block(block) - 1);
            const int64_t at = sample * mask.of_sample + head_of(head, own) * mask.of_head + own % tokens * mask.of_token;
            part.masks[r] = {mask, at};
        }
        for (int r = 0; causal && r < QUERIES; r++)
            part.visible[r] = all - tokens + (block * QUERIES + r) % tokens + 1;
        return part;
    }
};

}  // namespace
