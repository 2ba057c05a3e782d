// Attention of one token to codes that have a scale for each channel of a page, if they are keys, and for each token, if
// they are values. vectors.h comes ahead, and what is defined: HEAD channels, QUERIES of a KV head, PAGE tokens with
// KEY_BITS and VALUE_BITS, GROUP channels of a value that share a scale, SINKS exact first tokens, and whether tokens,
// and scales, are of BFLOAT16 or are floats, and halves.
//
// A part of a context, of a KV head, is read in pieces of at most a page: scores, then weights by the largest score so
// far, then values. Scores are powers of two. Where everything lies is what a Context says: pool(which, index), the
// codes, scales and zero points of a page of keys, and of values; key(token) and value(token), those that are exact, and
// key_sink and value_sink.
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

inline float number(float x) { return x; }

inline float number(Bfloat16 x) {
    const uint32_t bits = (uint32_t)x.bits << 16;
    float found;
    std::memcpy(&found, &bits, sizeof(found));
    return found;
}

inline void round_to(float& to, float x) { to = x; }

inline void round_to(Bfloat16& to, float x) {  // to the nearest, and of two to the even one
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof(bits));
    to.bits = x == x ? (bits + 0x7fff + (bits >> 16 & 1)) >> 16 : 0x7fc0;
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

    Part(const Token* from, float scale) {
        for (int i = 0; i < QUERIES * HEAD; i++) q[i] = number(from[i]) * (scale / LN_2);
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

    template <typename Context>
    void score_keys_of(const Context& context, int64_t page) {
        const auto *scales = (const Scale*)context.pool(1, page), *zeros = (const Scale*)context.pool(2, page);
        score_page(context.pool(0, page), scales, zeros);
    }

    // Pages whose keys and values are packed.
    template <typename Context>
    void add_pages(const Context& context, int64_t begin, int64_t end) {
        for (int64_t page = begin; page < end; page++) {
            score_keys_of(context, page);
            weigh(PAGE);
            const auto *scales = (const Scale*)context.pool(4, page), *zeros = (const Scale*)context.pool(5, page);
            add_page(context.pool(3, page), scales, zeros);
        }
    }

    // Tokens whose values are exact: those of pages from packed on, whose keys are in them up to half, and sinks.
    template <typename Context>
    void add_others(const Context& context, int64_t packed, int64_t half, int64_t total) {
        for (int64_t page = packed, token = SINKS + packed * PAGE; token < total; page++, token += PAGE) {
            const int count = std::min<int64_t>(PAGE, total - token);
            if (page < half) score_keys_of(context, page);
            else score_exact(count, [&](int t) { return context.key(token + t); });
            weigh(count);
            add_exact(count, [&](int t) { return context.value(token + t); });
        }
        for (int64_t token = 0; token < std::min<int64_t>(SINKS, total); token += PAGE) {
            const int count = std::min<int64_t>(PAGE, std::min<int64_t>(SINKS, total) - token);
            score_exact(count, [&](int t) { return context.key_sink(token + t); });
            weigh(count);
            add_exact(count, [&](int t) { return context.value_sink(token + t); });
        }
    }
};

// Attention of one token each of many samples, to keys by scale. q, out: [many, heads * QUERIES, HEAD]. Of each sample:
// total tokens, packed pages, and half, those whose keys are. contexts(b, head): the Context of a KV head of a sample.
template <typename Contexts>
void attend_all(
    const Token* q, float scale, Token* out, const int64_t* total, const int64_t* packed, const int64_t* half,
    int64_t many, int64_t heads, const Contexts& contexts, int64_t threads
) {
    std::vector<int64_t> sample_of, first(many + 1);  // of parts, which are of all heads; the last has the others
    for (int64_t b = 0; b < many; b++) {
        first[b] = sample_of.size();
        sample_of.insert(sample_of.end(), packed[b] / AT_ONCE + 1, b);
    }
    first[many] = sample_of.size();
    const int64_t parts = first[many];
    const int64_t rows = parts * heads * QUERIES;
    std::vector<float> outs(rows * HEAD), most(rows), sum(rows);
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (threads > 1)
    for (int64_t i = 0; i < parts * heads; i++) {
        const int64_t part = i / heads, b = sample_of[part], begin = (part - first[b]) * AT_ONCE;
        const auto context = contexts(b, i % heads);
        Part found(q + (b * heads + i % heads) * QUERIES * HEAD, scale);
        found.add_pages(context, begin, std::min(begin + AT_ONCE, packed[b]));
        if (part + 1 == first[b + 1]) found.add_others(context, packed[b], half[b], total[b]);
        std::copy(found.out, found.out + QUERIES * HEAD, outs.data() + i * QUERIES * HEAD);
        std::copy(found.most, found.most + QUERIES, most.data() + i * QUERIES);
        std::copy(found.sum, found.sum + QUERIES, sum.data() + i * QUERIES);
    }
    for (int64_t b = 0; b < many; b++)
        for (int64_t row = 0; row < heads * QUERIES; row++) {
            float high = -INFINITY, all = 0, sums[HEAD] = {};
            for (int64_t part = first[b]; part < first[b + 1]; part++)
                high = std::max(high, most[part * heads * QUERIES + row]);
            for (int64_t part = first[b]; part < first[b + 1]; part++) {
                const int64_t at = part * heads * QUERIES + row;
                const float less = std::exp2(most[at] - high);
                all += sum[at] * less;
                for (int d = 0; d < HEAD; d++) sums[d] += outs[at * HEAD + d] * less;
            }
            Token* own = out + (b * heads * QUERIES + row) * HEAD;
            for (int d = 0; d < HEAD; d++) round_to(own[d], sums[d] / all);
        }
}

}  // namespace
