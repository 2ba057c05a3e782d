// Attention of many queries over a part of a context. vectors.h comes ahead, and what is defined: HEAD channels, FACTOR,
// what products of queries and keys are multiplied by to be powers of two, BFLOAT16, whether queries, keys and values
// are, and HIDDEN, the score of a token that a query does not see.
//
// Products of matrices stay in registers, of ROWS queries with PANEL tokens or channels; scores are powers of two, and
// what is added up is scaled whenever a query finds a larger one.
namespace {

constexpr int ROWS = 6, WIDE = LANES == 8 ? 2 : 4;  // so that sums fit the registers
constexpr int TOKENS = 512, QUERIES = 16 * ROWS;  // of a block
constexpr int64_t PANEL = WIDE * LANES;
constexpr int64_t CHANNELS = (HEAD + PANEL - 1) / PANEL * PANEL;
constexpr float UNSEEN = HIDDEN;

#if BFLOAT16
typedef uint16_t Given;
inline float number(Given x) {
    const uint32_t bits = uint32_t(x) << 16;
    float found;
    std::memcpy(&found, &bits, sizeof(found));
    return found;
}
#else
typedef float Given;
inline float number(Given x) { return x; }
#endif

#define PAIRED (BFLOAT16 && __AVX512BF16__ && HEAD % 2 == 0)  // two bfloat16 are a factor of products

// What products take at a time of what they sum over: DEPTH numbers.
#if PAIRED
constexpr int DEPTH = 2;
typedef uint32_t __attribute__((may_alias)) Factor;
inline Factor factor(Given first, Given second) { return first | Factor(second) << 16; }
inline Factor factor(const Given* x) { return factor(x[0], x[1]); }
inline void add_product(Floats& sum, Ints some, Factor x) {
    const auto of_all = (__m512bh)_mm512_set1_epi32(x);
    sum = (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)some, of_all);
}
typedef Ints Factors;
#else
constexpr int DEPTH = 1;
typedef float Factor;
inline Factor factor(Given first, Given) { return number(first); }
inline Factor factor(const Given* x) { return number(*x); }
inline void add_product(Floats& sum, Floats some, Factor x) { sum += some * x; }
typedef Floats Factors;
#endif
constexpr int64_t DEEP = HEAD / DEPTH;  // of products with keys

// out [ROWS, PANEL] is set to, or more by, the product of a [ROWS, depth] and b [depth, PANEL]; rows are apart.
template <bool ADD>
inline void multiply(const Factor* a, int a_apart, const Factor* b, int b_apart, int depth, float* out, int out_apart) {
    Floats sum[ROWS][WIDE] = {};
    if (ADD)
        for (int m = 0; m < ROWS; m++)
            for (int v = 0; v < WIDE; v++) sum[m][v] = load<Floats>(out + m * out_apart + v * LANES);
    for (int k = 0; k < depth; k++) {
        Factors some[WIDE];
        UNROLLED for (int v = 0; v < WIDE; v++) some[v] = load<Factors>(b + k * b_apart + v * LANES);
        UNROLLED for (int m = 0; m < ROWS; m++) {
            const Factor x = a[m * a_apart + k];
            UNROLLED for (int v = 0; v < WIDE; v++) add_product(sum[m][v], some[v], x);
        }
    }
    for (int m = 0; m < ROWS; m++)
        for (int v = 0; v < WIDE; v++) store(out + m * out_apart + v * LANES, sum[m][v]);
}

// Of a block of queries. weights: those of a row lie where its scores were, if they are as long.
struct Block {
    alignas(64) Factor q[QUERIES * DEEP];
    alignas(64) float scores[QUERIES * TOKENS], out[QUERIES * CHANNELS];
    float most[QUERIES], sum[QUERIES];

    Factor* weights(int row) { return (Factor*)(scores + row * TOKENS); }
};

// Of a row: weights as products take them, in the place of whole vectors of them.
inline void as_factors(float* weights, int count) {
#if PAIRED
    char* out = (char*)weights;
    for (int t = 0; t < count; t += LANES, out += 2 * LANES) {
        const auto rounded = _mm512_cvtneps_pbh((__m512)load<Floats>(weights + t));
        std::memcpy(out, &rounded, sizeof(rounded));
    }
#endif
}

// Products of a row to weights, and what came before scaled to them. mask: what is added to scores, or null.
inline void weigh(Block& block, int row, int tokens, const float* mask) {
    float* scores = block.scores + row * TOKENS;
    for (int t = 0; t < tokens; t++) scores[t] *= float(FACTOR);
    if (mask)
        for (int t = 0; t < tokens; t++) scores[t] += mask[t];
    while (tokens % LANES) scores[tokens++] = UNSEEN;
    const float before = block.most[row], sum = to_weights(scores, tokens, block.most[row]);
    as_factors(scores, tokens);
    const float less = exp2(Floats{} + (before - block.most[row]))[0];
    block.sum[row] = block.sum[row] * less + sum;
    if (less == 1.0f) return;
    for (float* out = block.out + row * CHANNELS; out < block.out + (row + 1) * CHANNELS; out += LANES)
        store(out, load<Floats>(out) * less);
}

// What a row found, added to what is there already of other parts of its context.
inline void merge(const float* found, float most, float sum, float* out, float* logsum) {
    const float own = sum > 0 ? (most + std::log2(sum)) * LN_2 : UNSEEN;
    const float share = 1 / (1 + std::exp(*logsum - own)), less = sum > 0 ? share / sum : 0;
    for (int d = 0; d < HEAD; d++) out[d] += found[d] * less - out[d] * share;
    const float high = std::max(own, *logsum), low = std::min(own, *logsum);
    *logsum = high + std::log1p(std::exp(low - high));
}

// What the queries of a head see. keys: [tokens / PANEL, DEEP, PANEL]. values: [tokens / DEPTH, CHANNELS]. Both are
// padded. mask: of each query, apart, or of all. last: of each query, the tokens up to the last one that it sees.
struct Context {
    const Factor *keys, *values;
    const float* mask;
    const int64_t* last;
    int64_t queries, apart;

    // Of some rows, which are those of several query heads behind each other.
    void attend(Block& block, const Given* q, int64_t begin, int64_t end, float* out, float* logsum) const {
        const int rows = end - begin;
        int64_t seen = 0;
        for (int i = 0; i < QUERIES; i++) {
            const int64_t row = std::min(begin + i, end - 1);
            for (int d = 0; d < DEEP; d++) block.q[i * DEEP + d] = factor(q + row * HEAD + d * DEPTH);
            seen = std::max(seen, last[row % queries]);
            block.most[i] = UNSEEN, block.sum[i] = 0;
        }
        std::fill(block.out, block.out + QUERIES * CHANNELS, 0.0f);
        for (int64_t first = 0; first < seen; first += TOKENS) {
            const int count = std::min<int64_t>(TOKENS, seen - first);
            for (int t = 0; t < count; t += PANEL)
                for (int m = 0; m < rows; m += ROWS) {
                    float* scores = block.scores + m * TOKENS + t;
                    multiply<false>(block.q + m * DEEP, DEEP, keys + (first + t) * DEEP, PANEL, DEEP, scores, TOKENS);
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
            merge(block.out + i * CHANNELS, block.most[i], block.sum[i], out + row * HEAD, logsum + row);
    }
};

// At most PANEL keys [tokens, HEAD] turned; what is behind them is anything.
inline void turn(const Given* keys, int tokens, Factor* out) {
    for (int t = 0; t < tokens; t++)
        for (int d = 0; d < DEEP; d++) out[d * PANEL + t] = factor(keys + t * HEAD + d * DEPTH);
}

// Values [tokens, HEAD] as products take them.
inline void gather(const Given* values, int tokens, Factor* out) {
    static const Given none[HEAD] = {};
    for (int t = 0; t < tokens; t += DEPTH) {
        const Given *first = values + t * HEAD, *second = t + 1 < tokens ? first + HEAD : none;
        for (int d = 0; d < HEAD; d++) out[t / DEPTH * CHANNELS + d] = factor(first[d], second[d]);
    }
}

}  // namespace

// q, out: [tiles, heads, rows, D], the rows of a head being those of some query heads, of as many queries each; those
// of sample b are of tile where[b]. k, v: [batch * heads, tokens, D]. mask: [batch, mask_rows, tokens], of each query,
// or of all, or of none. logsum: [tiles, heads, rows].
extern "C" void kernel(
    const Given* q, const Given* k, const Given* v, const float* mask, const int64_t* where, float* out, float* logsum,
    int64_t batch, int64_t heads, int64_t rows, int64_t queries, int64_t tokens, int64_t mask_rows, int64_t threads
) {
    const int64_t many = batch * heads, parts = (rows + QUERIES - 1) / QUERIES;
    const int64_t room = (tokens + PANEL - 1) / PANEL * PANEL;
    constexpr bool COPIED = BFLOAT16 || HEAD != CHANNELS;  // values that are no whole panels of factors
    std::unique_ptr<Factor[]> keys(new Factor[many * room * DEEP]);
    std::unique_ptr<Factor[]> values(COPIED ? new Factor[many * room / DEPTH * CHANNELS] : nullptr);
    std::vector<int64_t> last(batch * queries, tokens);
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        std::unique_ptr<Block> block(new Block);
#pragma omp for
        for (int64_t i = 0; i < many * room / PANEL; i++) {
            const int64_t h = i * PANEL / room, first = i * PANEL % room, count = std::min(PANEL, tokens - first);
            turn(k + (h * tokens + first) * HEAD, count, keys.get() + i * PANEL * DEEP);
            if (COPIED) gather(v + (h * tokens + first) * HEAD, count, values.get() + i * PANEL / DEPTH * CHANNELS);
        }
#pragma omp for
        for (int64_t i = 0; i < (mask_rows ? batch * queries : 0); i++) {
            const float* own = mask + (mask_rows == 1 ? i / queries : i) * tokens;
            while (last[i] && own[last[i] - 1] <= UNSEEN) last[i]--;
        }
#pragma omp for schedule(dynamic)
        for (int64_t i = 0; i < many * parts; i++) {
            const int64_t h = i / parts, b = h / heads, begin = i % parts * QUERIES;
            const Factor* own = COPIED ? values.get() + h * room / DEPTH * CHANNELS : (const Factor*)v + h * tokens * HEAD;
            const Context context = {
                keys.get() + h * room * DEEP, own, mask_rows ? mask + b * mask_rows * tokens : nullptr,
                last.data() + b * queries, queries, mask_rows > 1 ? tokens : 0,
            };
            const int64_t end = std::min(begin + QUERIES, rows), to = (where[b] * heads + h % heads) * rows;
            context.attend(*block, q + to * HEAD, begin, end, out + to * HEAD, logsum + to);
        }
    }
}
