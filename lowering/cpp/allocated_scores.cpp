// Scores of one query token with the keys in pages, in the order of tokens. allocated.h comes ahead.

namespace {

constexpr int ROWS = 4, PAGES = 4;  // rows of a product with the basis, and pages whose queries are turned together

// What queries make of the fields of four tokens of a rank, one from each plane of pairs: found[plane * COUNT + query].
template <int RANK, int COUNT>
inline void four_scores(const uint8_t* page, int row, const float* of_fields, float* found) {
    constexpr Rank own = RANKS[RANK];
    constexpr int PLANES = LANES == 16 ? 4 : 2, SUMS = PLANES * COUNT;  // as many as there are registers for
    const uint8_t* pairs = page + own.first_byte + row * own.pairs;
    const uint8_t* singles = page + own.singles_byte() + row % own.eighth() * own.singles;
    for (int first = 0; first < 4; first += PLANES) {
        Floats total[padded(SUMS)] = {};
        const auto add = [&](Ints bytes, int ones, const float* worth) {
            UNROLLED for (int plane = 0; plane < PLANES; plane++) {
                const Floats field = numbers(bytes & ones << 2 * (first + plane));
                UNROLLED for (int r = 0; r < COUNT; r++)
                    total[plane * COUNT + r] += field * load<Floats>(worth + r * FIELDS);
            }
        };
        for (int f = 0; f < own.pairs; f += LANES) add(widened(pairs + f), 3, of_fields + own.first_field + f);
        for (int f = 0; f < own.singles; f += LANES)  // shifted to where the pairs of their tokens are
            add(widened(singles + f) >> row / own.eighth(), 1, of_fields + own.of_singles() + f);
        UNROLLED for (int i = 0; i < SUMS; i += LANES) store(found + first * COUNT + i, sums(total + i));
    }
}

// Adds the scores of queries that are apart in out, for the tokens of a rank.
template <int RANK, int COUNT>
inline void rank_scores(
    const uint8_t* page, const float* of_fields, const float* gain, const int32_t* order, int64_t apart, float* out
) {
    constexpr Rank own = RANKS[RANK];
    float offset[COUNT];
    for (int r = 0; r < COUNT; r++) {
        Floats pairs = {}, singles = {};
        const float* mine = of_fields + r * FIELDS;
        for (int f = own.first_field; f < own.of_singles(); f += LANES) pairs += load<Floats>(mine + f);
        for (int f = own.of_singles(); f < own.end_field(); f += LANES) singles += load<Floats>(mine + f);
        pairs = PAIR * pairs + SINGLE * singles;
        offset[r] = 0;
        for (int lane = 0; lane < LANES; lane++) offset[r] += pairs[lane];
    }
    for (int row = 0; row < own.quarter(); row++) {
        float found[4 * COUNT + LANES];
        four_scores<RANK, COUNT>(page, row, of_fields, found);
        UNROLLED for (int plane = 0; plane < 4; plane++) {
            const int t = plane * own.quarter() + row;
            const float unit = 1.0f / (1 << 2 * plane), times = gain[page[own.gains_byte() + t]];
            float* mine = out + order[first_token(RANK) + t];
            UNROLLED for (int r = 0; r < COUNT; r++)
                mine[r * apart] += (found[plane * COUNT + r] * unit - offset[r]) * times;
        }
    }
}

// A head's basis and places as the loops here want them: blocks of the basis transposed, and for each field in padded
// arrays its coordinate and its weight there.
struct Head {
    float columns[HEAD * BLOCK + LANES];
    int32_t coordinate[FIELDS] = {};
    float weight[FIELDS] = {};

    Head(const float* basis, const int32_t* places, const float* worth) {
        for (int i = 0; i < HEAD; i++)
            for (int c = 0; c < BLOCK; c++)
                columns[i / BLOCK * BLOCK * BLOCK + c * BLOCK + i % BLOCK] = basis[i * BLOCK + c];
        each_field([&](int field, int at, float, int) {
            coordinate[field] = places[at] % HEAD;
            weight[field] = worth[places[at] / HEAD];
        });
    }

    // What ROWS queries make of a step in each coordinate.
    void steps(const float* q, float* found) const {
        constexpr int VECTORS = (BLOCK + LANES - 1) / LANES;
        for (int block = 0; block < HEAD; block += BLOCK) {
            Floats total[ROWS][VECTORS] = {};
            for (int c = 0; c < BLOCK; c++)
                UNROLLED for (int v = 0; v < VECTORS; v++) {
                    const Floats column = load<Floats>(columns + (block + c) * BLOCK + v * LANES);
                    UNROLLED for (int r = 0; r < ROWS; r++) total[r][v] += q[r * HEAD + block + c] * column;
                }
            for (int r = 0; r < ROWS; r++) std::memcpy(found + r * HEAD + block, total[r], BLOCK * sizeof(float));
        }
    }

    void of_fields(const float* steps, float* found) const {
#if LANES == 16
        if constexpr (HEAD % 32 == 0) {  // looked up in registers
            __m512 step[HEAD / LANES];
            UNROLLED for (int v = 0; v < HEAD / LANES; v++) step[v] = _mm512_loadu_ps(steps + v * LANES);
            for (int f = 0; f < FIELDS; f += LANES) {
                const __m512i at = _mm512_loadu_si512(coordinate + f);
                __m512 x = _mm512_permutex2var_ps(step[0], at, step[1]);
                UNROLLED for (int v = 2; v < HEAD / LANES; v += 2) {
                    const __mmask16 there = _mm512_cmpge_epi32_mask(at, _mm512_set1_epi32(v * LANES));
                    x = _mm512_mask_blend_ps(there, x, _mm512_permutex2var_ps(step[v], at, step[v + 1]));
                }
                _mm512_storeu_ps(found + f, _mm512_mul_ps(x, _mm512_loadu_ps(weight + f)));
            }
            return;
        }
#endif
        for (int f = 0; f < FIELDS; f++) found[f] = steps[coordinate[f]] * weight[f];
    }
};

// Scores of ROWS queries with the mean of the keys at each token of a page, whose channels are [HEAD, PAGE].
inline void mean_scores(const float* q, const float* mean, float* found) {
    constexpr int VECTORS = (PAGE + LANES - 1) / LANES;
    Floats total[ROWS][VECTORS] = {};
    for (int d = 0; d < HEAD; d++)
        UNROLLED for (int v = 0; v < VECTORS; v++) {
            const Floats channel = load<Floats>(mean + d * PAGE + v * LANES);
            UNROLLED for (int r = 0; r < ROWS; r++) total[r][v] += q[r * HEAD + d] * channel;
        }
    for (int r = 0; r < ROWS; r++) std::memcpy(found + r * PAGE, total[r], PAGE * sizeof(float));
}

// A query as it is seen from where the tables are of. Channels of pair i are i * STRIDE and apart.
template <int STRIDE>
inline void turn_back(const float* q, const float* cos, const float* sin, int pairs, int apart, float* out) {
    std::memcpy(out, q, HEAD * sizeof(float));
    for (int i = 0; i < pairs; i++) {
        const float first = q[i * STRIDE], second = q[i * STRIDE + apart];
        out[i * STRIDE] = first * cos[i] + second * sin[i];
        out[i * STRIDE + apart] = second * cos[i] - first * sin[i];
    }
}

}  // namespace

// q: [BH, R, D]. cos, sin: [B, N, pairs], of the middles of pages; without pairs, keys are as q is. mean: [BH, D, PAGE],
// of what was subtracted from tokens of a page, if they are centered. basis: [BH, D, b].
// places: [BH, NUM_FIELDS]. pages: [BH, room, PAGE_BYTES], count of which are read. out: [BH, R, count * PAGE].
extern "C" void kernel(
    const float* q, const float* cos, const float* sin, const float* mean, const uint8_t* pages, const float* basis,
    const int32_t* places, const float* table, float* out, int64_t batch, int64_t heads, int64_t count, int64_t room,
    int64_t pairs, int64_t interleaved, int64_t centered, int64_t threads
) {
    const int64_t parts = parts_of(count, threads);
#pragma omp parallel for collapse(2) num_threads(threads) if (threads > 1)
    for (int64_t h = 0; h < batch * heads; h++)
        for (int64_t part = 0; part < parts; part++) {
            const Head head(basis + h * HEAD * BLOCK, places + h * NUM_FIELDS, table + GAINS);
            float turned[PAGES * QUERIES * HEAD], steps[PAGES * QUERIES * HEAD];
            float of_mean[PAGES * QUERIES * PAGE] = {}, own_mean[HEAD * PAGE + LANES];
            if (centered) std::memcpy(own_mean, mean + h * HEAD * PAGE, HEAD * PAGE * sizeof(float));
            alignas(64) float of_fields[QUERIES * FIELDS];
            int32_t order[PAGE] = {};
            const int64_t begin = part * count / parts, end = (part + 1) * count / parts;
            const auto turn = interleaved ? turn_back<2> : turn_back<1>;
            for (int64_t n = begin; n < end; n++) {
                const int ahead = (n - begin) % PAGES;
                if (pairs ? !ahead : n == begin) {
                    for (int i = 0; i < PAGES * QUERIES; i++) {
                        const int64_t row = (h / heads * count + std::min(n + i / QUERIES, end - 1)) * pairs;
                        const float* mine = q + (h * QUERIES + i % QUERIES) * HEAD;
                        turn(mine, cos + row, sin + row, pairs, interleaved ? 1 : pairs, turned + i * HEAD);
                    }
                    for (int i = 0; i < PAGES * QUERIES; i += ROWS) {
                        head.steps(turned + i * HEAD, steps + i * HEAD);
                        if (centered) mean_scores(turned + i * HEAD, own_mean, of_mean + i * PAGE);
                    }
                }
                if (pairs || n == begin)
                    for (int r = 0; r < QUERIES; r++)
                        head.of_fields(steps + (ahead * QUERIES + r) * HEAD, of_fields + r * FIELDS);
                for (int r = 0; r < QUERIES; r++) {
                    const float* mine = of_mean + ((pairs ? ahead : 0) * QUERIES + r) * PAGE;
                    std::memcpy(out + ((h * QUERIES + r) * count + n) * PAGE, mine, PAGE * sizeof(float));
                }
                const Page page(pages + h * room * PAGE_BYTES, n, room);
                find_order(page.bytes, order);
                each_queries([&](auto several, int r) {
                    float* mine = out + ((h * QUERIES + r) * count + n) * PAGE;
                    each_rank([&](auto rank) {
                        rank_scores<rank.value, several.value>(
                            page.bytes, of_fields + r * FIELDS, table, order, count * PAGE, mine
                        );
                    });
                });
            }
        }
}
