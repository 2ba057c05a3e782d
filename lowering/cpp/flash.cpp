// Attention of many queries over a part of a context. vectors.h comes ahead, and what is defined: HEAD channels, and
// HIDDEN, the score of a token that a query does not see.
//
// Products of matrices stay in registers, of ROWS queries with PANEL tokens or channels; scores are powers of two, and
// what is added up is scaled whenever a query finds a larger one.
namespace {

constexpr int ROWS = 6, WIDE = LANES == 8 ? 2 : 4;  // so that sums fit the registers
constexpr int TOKENS = 512, QUERIES = 16 * ROWS;  // of a block
constexpr int64_t PANEL = WIDE * LANES;
constexpr int64_t CHANNELS = (HEAD + PANEL - 1) / PANEL * PANEL;
constexpr float UNSEEN = HIDDEN;

// out [ROWS, PANEL] is set to, or more by, the product of a [ROWS, depth] and b [depth, PANEL]; rows are apart.
template <bool ADD>
inline void multiply(const float* a, int a_apart, const float* b, int b_apart, int depth, float* out, int out_apart) {
    Floats sum[ROWS][WIDE] = {};
    if (ADD)
        for (int m = 0; m < ROWS; m++)
            for (int v = 0; v < WIDE; v++) sum[m][v] = load<Floats>(out + m * out_apart + v * LANES);
    for (int k = 0; k < depth; k++) {
        Floats some[WIDE];
        UNROLLED for (int v = 0; v < WIDE; v++) some[v] = load<Floats>(b + k * b_apart + v * LANES);
        UNROLLED for (int m = 0; m < ROWS; m++) {
            const float x = a[m * a_apart + k];
            UNROLLED for (int v = 0; v < WIDE; v++) sum[m][v] += some[v] * x;
        }
    }
    for (int m = 0; m < ROWS; m++)
        for (int v = 0; v < WIDE; v++) store(out + m * out_apart + v * LANES, sum[m][v]);
}

// Of a block of queries.
struct Block {
    alignas(64) float q[QUERIES * HEAD], scores[QUERIES * TOKENS], out[QUERIES * CHANNELS];
    float most[QUERIES], sum[QUERIES];
};

// Scores of a row to weights, and what came before scaled to them. mask: what is added to them, or null.
inline void weigh(Block& block, int row, int tokens, const float* mask) {
    float* scores = block.scores + row * TOKENS;
    if (mask)
        for (int t = 0; t < tokens; t++) scores[t] += mask[t];
    while (tokens % LANES) scores[tokens++] = UNSEEN;
    const float before = block.most[row], sum = to_weights(scores, tokens, block.most[row]);
    const float less = exp2(Floats{} + (before - block.most[row]))[0];
    block.sum[row] = block.sum[row] * less + sum;
    if (less == 1.0f) return;
    for (float* out = block.out + row * CHANNELS; out < block.out + (row + 1) * CHANNELS; out += LANES)
        store(out, load<Floats>(out) * less);
}

// What the queries of a head see. keys: [tokens / PANEL, HEAD, PANEL]. values: [tokens, CHANNELS]. Both are padded.
// mask: of each query, apart, or of all. last: of each query, the tokens up to the last one that it sees.
struct Context {
    const float *keys, *values, *mask;
    const int64_t* last;
    int64_t queries, apart;

    // Of some rows, which are those of several query heads behind each other.
    void attend(Block& block, const float* q, int64_t begin, int64_t end, float* out, float* logsum) const {
        const int rows = end - begin;
        int64_t seen = 0;
        for (int i = 0; i < QUERIES; i++) {
            const int64_t row = std::min(begin + i, end - 1);
            for (int d = 0; d < HEAD; d++) block.q[i * HEAD + d] = q[row * HEAD + d] / LN_2;
            seen = std::max(seen, last[row % queries]);
            block.most[i] = UNSEEN, block.sum[i] = 0;
        }
        std::fill(block.out, block.out + QUERIES * CHANNELS, 0.0f);
        for (int64_t first = 0; first < seen; first += TOKENS) {
            const int count = std::min<int64_t>(TOKENS, seen - first);
            for (int t = 0; t < count; t += PANEL)
                for (int m = 0; m < rows; m += ROWS) {
                    float* scores = block.scores + m * TOKENS + t;
                    multiply<false>(block.q + m * HEAD, HEAD, keys + (first + t) * HEAD, PANEL, HEAD, scores, TOKENS);
                }
            for (int m = 0; m < rows; m++)
                weigh(block, m, count, mask ? mask + (begin + m) % queries * apart + first : nullptr);
            for (int d = 0; d < CHANNELS; d += PANEL)
                for (int m = 0; m < rows; m += ROWS) {
                    const float *weights = block.scores + m * TOKENS, *own = values + first * CHANNELS + d;
                    multiply<true>(weights, TOKENS, own, CHANNELS, count, block.out + m * CHANNELS + d, CHANNELS);
                }
        }
        for (int i = 0; i < rows; i++) {
            const float sum = block.sum[i], less = sum > 0 ? 1 / sum : 0;
            for (int d = 0; d < HEAD; d++) out[(begin + i) * HEAD + d] = block.out[i * CHANNELS + d] * less;
            logsum[begin + i] = sum > 0 ? (block.most[i] + std::log2(sum)) * LN_2 : UNSEEN;
        }
    }
};

// At most PANEL keys [tokens, HEAD] turned; what is behind them is anything.
inline void turn(const float* keys, int tokens, float* out) {
    for (int t = 0; t < tokens; t++)
        for (int d = 0; d < HEAD; d++) out[d * PANEL + t] = keys[t * HEAD + d];
}

}  // namespace

// q, out: [batch * heads, rows, D], the rows of a head being those of some query heads, of as many queries each. k, v:
// [batch * heads, tokens, D]. mask: [batch, mask_rows, tokens], of each query, or of all, or of none. logsum: [batch *
// heads, rows].
extern "C" void kernel(
    const float* q, const float* k, const float* v, const float* mask, float* out, float* logsum, int64_t batch,
    int64_t heads, int64_t rows, int64_t queries, int64_t tokens, int64_t mask_rows, int64_t threads
) {
    const int64_t many = batch * heads, parts = (rows + QUERIES - 1) / QUERIES;
    const int64_t room = (tokens + PANEL - 1) / PANEL * PANEL;
    constexpr bool COPIED = HEAD != CHANNELS;  // values whose rows are no whole panels
    std::unique_ptr<float[]> keys(new float[many * room * HEAD]);
    std::unique_ptr<float[]> values(COPIED ? new float[many * tokens * CHANNELS]() : nullptr);
    std::vector<int64_t> last(batch * queries, tokens);
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        std::unique_ptr<Block> block(new Block);
#pragma omp for
        for (int64_t i = 0; i < many * room / PANEL; i++) {
            const int64_t h = i * PANEL / room, first = i * PANEL % room, count = std::min(PANEL, tokens - first);
            turn(k + (h * tokens + first) * HEAD, count, keys.get() + i * PANEL * HEAD);
            for (int64_t t = h * tokens + first; COPIED && t < h * tokens + first + count; t++)
                std::copy(v + t * HEAD, v + (t + 1) * HEAD, values.get() + t * CHANNELS);
        }
#pragma omp for
        for (int64_t i = 0; i < (mask_rows ? batch * queries : 0); i++) {
            const float* own = mask + (mask_rows == 1 ? i / queries : i) * tokens;
            while (last[i] && own[last[i] - 1] <= UNSEEN) last[i]--;
        }
#pragma omp for schedule(dynamic)
        for (int64_t i = 0; i < many * parts; i++) {
            const int64_t h = i / parts, b = h / heads, begin = i % parts * QUERIES;
            const Context context = {
                keys.get() + h * room * HEAD, (COPIED ? values.get() : v) + h * tokens * CHANNELS,
                mask_rows ? mask + b * mask_rows * tokens : nullptr, last.data() + b * queries, queries,
                mask_rows > 1 ? tokens : 0,
            };
            const int64_t end = std::min(begin + QUERIES, rows);
            context.attend(*block, q + h * rows * HEAD, begin, end, out + h * rows * HEAD, logsum + h * rows);
        }
    }
}
