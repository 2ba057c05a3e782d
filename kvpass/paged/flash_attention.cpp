// Attention of many queries over a part of a context. Needs vectors.h.
//
// Macros: HEAD channels. FACTOR: factor that converts products of queries and keys to base-2 logarithms. BFLOAT16:
// queries, keys and values are bfloat16; otherwise float32. HIDDEN: the score of a token that a query does not see.
//
// The matrix products of ROWS queries with PANEL tokens or channels stay in registers. The softmax is a running one:
// earlier sums are rescaled whenever a query finds a larger score.
namespace {

constexpr int ROWS = 6, PANEL_VECTORS = LANES == 8 ? 2 : 4;  // the sums fit into registers
constexpr int TOKENS = 512, QUERIES = 16 * ROWS;  // per block
constexpr int64_t PANEL = PANEL_VECTORS * LANES;
constexpr int64_t CHANNELS = (HEAD + PANEL - 1) / PANEL * PANEL;
constexpr float MASKED = HIDDEN;

#if BFLOAT16
typedef uint16_t Stored;
inline float number(Stored x) {
    const uint32_t bits = uint32_t(x) << 16;
    float found;
    std::memcpy(&found, &bits, sizeof(found));
    return found;
}
#else
typedef float Stored;
inline float number(Stored x) { return x; }
#endif

#define PAIRED (BFLOAT16 && __AVX512BF16__ && HEAD % 2 == 0)  // a factor of a product is two bfloat16

// Products sum over DEPTH numbers at a time.
#if PAIRED
constexpr int DEPTH = 2;
typedef uint32_t __attribute__((may_alias)) Factor;
inline Factor factor(Stored first, Stored second) { return first | Factor(second) << 16; }
inline Factor factor(const Stored* x) { return factor(x[0], x[1]); }
inline void add_product(Floats& sum, Ints loaded, Factor x) {
    const auto broadcast = (__m512bh)_mm512_set1_epi32(x);
    sum = (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)loaded, broadcast);
}
typedef Ints Factors;
#else
constexpr int DEPTH = 1;
typedef float Factor;
inline Factor factor(Stored first, Stored) { return number(first); }
inline Factor factor(const Stored* x) { return number(*x); }
inline void add_product(Floats& sum, Floats loaded, Factor x) { sum += loaded * x; }
typedef Floats Factors;
#endif
constexpr int64_t KEY_DEPTH = HEAD / DEPTH;  // factors per key

// Sets out [ROWS, PANEL] to the product of a [ROWS, depth] and b [depth, PANEL], or adds the product to it (ADD).
// a_apart, b_apart, out_apart: strides between rows.
template <bool ADD>
inline void multiply(const Factor* a, int a_apart, const Factor* b, int b_apart, int depth, float* out, int out_apart) {
    Floats sum[ROWS][PANEL_VECTORS] = {};
    if (ADD)
        for (int m = 0; m < ROWS; m++)
            for (int v = 0; v < PANEL_VECTORS; v++) sum[m][v] = load<Floats>(out + m * out_apart + v * LANES);
    for (int k = 0; k < depth; k++) {
        Factors loaded[PANEL_VECTORS];
        UNROLLED for (int v = 0; v < PANEL_VECTORS; v++) loaded[v] = load<Factors>(b + k * b_apart + v * LANES);
        UNROLLED for (int m = 0; m < ROWS; m++) {
            const Factor x = a[m * a_apart + k];
            UNROLLED for (int v = 0; v < PANEL_VECTORS; v++) add_product(sum[m][v], loaded[v], x);
        }
    }
    for (int m = 0; m < ROWS; m++)
        for (int v = 0; v < PANEL_VECTORS; v++) store(out + m * out_apart + v * LANES, sum[m][v]);
}

// The state of a block of queries. The weights of a row replace its scores.
struct Block {
    alignas(64) Factor q[QUERIES * KEY_DEPTH];
    alignas(64) float scores[QUERIES * TOKENS], out[QUERIES * CHANNELS];
    float peak[QUERIES], sum[QUERIES];

    Factor* weights(int row) { return (Factor*)(scores + row * TOKENS); }
};

// Converts the weights of a row, in place, to factors of products.
inline void as_factors(float* weights, int count) {
#if PAIRED
    char* out = (char*)weights;
    for (int t = 0; t < count; t += LANES, out += 2 * LANES) {
        const auto rounded = _mm512_cvtneps_pbh((__m512)load<Floats>(weights + t));
        std::memcpy(out, &rounded, sizeof(rounded));
    }
#endif
}

// Converts the products of a row to weights, and rescales earlier sums to match. mask: numbers that are added to the
// scores, or null.
inline void weigh(Block& block, int row, int tokens, const float* mask) {
    float* scores = block.scores + row * TOKENS;
    for (int t = 0; t < tokens; t++) scores[t] *= float(FACTOR);
    if (mask)
        for (int t = 0; t < tokens; t++) scores[t] += mask[t];
    while (tokens % LANES) scores[tokens++] = MASKED;
    const float before = block.peak[row], sum = to_weights(scores, tokens, block.peak[row]);
    as_factors(scores, tokens);
    const float rescale = exp2(Floats{} + (before - block.peak[row]))[0];
    block.sum[row] = block.sum[row] * rescale + sum;
    if (rescale == 1.0f) return;
    for (float* out = block.out + row * CHANNELS; out < block.out + (row + 1) * CHANNELS; out += LANES)
        store(out, load<Floats>(out) * rescale);
}

// Merges the result of a row with out and logsum, which hold those of other parts of its context.
inline void merge(const float* found, float peak, float sum, float* out, float* logsum) {
    const float own = sum > 0 ? (peak + std::log2(sum)) * LN_2 : MASKED;
    const float share = 1 / (1 + std::exp(*logsum - own)), rescale = sum > 0 ? share / sum : 0;
    for (int d = 0; d < HEAD; d++) out[d] += found[d] * rescale - out[d] * share;
    const float high = std::max(own, *logsum), low = std::min(own, *logsum);
    *logsum = high + std::log1p(std::exp(low - high));
}

// The keys and values that the queries of a head attend to. keys: [tokens / PANEL, KEY_DEPTH, PANEL]. values:
// [tokens / DEPTH, CHANNELS]. Both are padded. mask: [queries, apart], or one row for all if apart is 0; may be null.
// last: for each query, the number of tokens up to the last one that it sees.
struct Context {
    const Factor *keys, *values;
    const float* mask;
    const int64_t* last;
    int64_t queries, apart;

    // Attends with rows [begin, end) of q, the query heads of a KV head one after another.
    void attend(Block& block, const Stored* q, int64_t begin, int64_t end, float* out, float* logsum) const {
        const int rows = end - begin;
        int64_t seen = 0;
        for (int i = 0; i < QUERIES; i++) {
            const int64_t row = std::min(begin + i, end - 1);
            for (int d = 0; d < KEY_DEPTH; d++) block.q[i * KEY_DEPTH + d] = factor(q + row * HEAD + d * DEPTH);
            seen = std::max(seen, last[row % queries]);
            block.peak[i] = MASKED, block.sum[i] = 0;
        }
        std::fill(block.out, block.out + QUERIES * CHANNELS, 0.0f);
        for (int64_t first = 0; first < seen; first += TOKENS) {
            const int count = std::min<int64_t>(TOKENS, seen - first);
            for (int t = 0; t < count; t += PANEL)
                for (int m = 0; m < rows; m += ROWS) {
                    float* scores = block.scores + m * TOKENS + t;
                    const Factor *q_rows = block.q + m * KEY_DEPTH, *panel = keys + (first + t) * KEY_DEPTH;
                    multiply<false>(q_rows, KEY_DEPTH, panel, PANEL, KEY_DEPTH, scores, TOKENS);
                }
            for (int m = 0; m < rows; m++)
                weigh(block, m, count, mask ? mask + (begin + m) % queries * apart + first : nullptr);
            const int depth = (count + DEPTH - 1) / DEPTH;
            for (int d = 0; d < CHANNELS; d += PANEL)
                for (int m = 0; m < rows; m += ROWS) {
                    const Factor *weights = block.weights(m), *own = values + first / DEPTH * CHANNELS + d;
                    multiply<true>(weights, TOKENS, own, CHANNELS, depth, block.out + m * CHANNELS + d, CHANNELS);
                }
        }
        for (int64_t i = 0, row = begin; i < rows; i++, row++)
            merge(block.out + i * CHANNELS, block.peak[i], block.sum[i], out + row * HEAD, logsum + row);
    }
};

// Transposes at most PANEL keys [tokens, HEAD]. The rest of the panel is undefined.
inline void transpose_keys(const Stored* keys, int tokens, Factor* out) {
    for (int t = 0; t < tokens; t++)
        for (int d = 0; d < KEY_DEPTH; d++) out[d * PANEL + t] = factor(keys + t * HEAD + d * DEPTH);
}

// Converts values [tokens, HEAD] to factors of products.
inline void pack_values(const Stored* values, int tokens, Factor* out) {
    static const Stored none[HEAD] = {};
    for (int t = 0; t < tokens; t += DEPTH) {
        const Stored *first = values + t * HEAD, *second = t + 1 < tokens ? first + HEAD : none;
        for (int d = 0; d < HEAD; d++) out[t / DEPTH * CHANNELS + d] = factor(first[d], second[d]);
    }
}

}  // namespace

// q, out: [tiles, heads, rows, D]. The rows of a KV head are those of its query heads, with queries rows each. Sample b
// uses tile where[b]. k, v: [batch * heads, tokens, D]. mask: [batch, mask_rows, tokens]; mask_rows is the number of
// queries, 1 if all queries share a mask, or 0 without one. logsum: [tiles, heads, rows].
extern "C" void kernel(
    const Stored* q, const Stored* k, const Stored* v, const float* mask, const int64_t* where, float* out,
    float* logsum, int64_t batch, int64_t heads, int64_t rows, int64_t queries, int64_t tokens, int64_t mask_rows, int64_t threads
) {
    const int64_t all_heads = batch * heads, parts = (rows + QUERIES - 1) / QUERIES;
    const int64_t room = (tokens + PANEL - 1) / PANEL * PANEL;
    constexpr bool COPIED = BFLOAT16 || HEAD != CHANNELS;  // values cannot be read in place
    std::unique_ptr<Factor[]> keys(new Factor[all_heads * room * KEY_DEPTH]);
    std::unique_ptr<Factor[]> values(COPIED ? new Factor[all_heads * room / DEPTH * CHANNELS] : nullptr);
    std::vector<int64_t> last(batch * queries, tokens);
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        std::unique_ptr<Block> block(new Block);
#pragma omp for
        for (int64_t i = 0; i < all_heads * room / PANEL; i++) {
            const int64_t h = i * PANEL / room, first = i * PANEL % room, count = std::min(PANEL, tokens - first);
            transpose_keys(k + (h * tokens + first) * HEAD, count, keys.get() + i * PANEL * KEY_DEPTH);
            if (COPIED) pack_values(v + (h * tokens + first) * HEAD, count, values.get() + i * PANEL / DEPTH * CHANNELS);
        }
#pragma omp for
        for (int64_t i = 0; i < (mask_rows ? batch * queries : 0); i++) {
            const float* own = mask + (mask_rows == 1 ? i / queries : i) * tokens;
            while (last[i] && own[last[i] - 1] <= MASKED) last[i]--;
        }
#pragma omp for schedule(dynamic)
        for (int64_t i = 0; i < all_heads * parts; i++) {
            const int64_t h = i / parts, b = h / heads, begin = i % parts * QUERIES;
            const Factor* own = COPIED ? values.get() + h * room / DEPTH * CHANNELS : (const Factor*)v + h * tokens * HEAD;
            const Context context = {
                keys.get() + h * room * KEY_DEPTH, own, mask_rows ? mask + b * mask_rows * tokens : nullptr,
                last.data() + b * queries, queries, mask_rows > 1 ? tokens : 0,
            };
            const int64_t end = std::min(begin + QUERIES, rows), to = (where[b] * heads + h % heads) * rows;
            context.attend(*block, q + to * HEAD, begin, end, out + to * HEAD, logsum + to);
        }
    }
}
