// Scores of one query token with the keys in pages, in token order. Needs allocated.h and tokens.h.

namespace {

constexpr int PREPARED_PAGES = 4;  // pages whose queries are rotated together
constexpr int ROWS = LANES > 8 && QUERIES % 3 == 0 ? 12 : QUERIES % 2 ? 4 : 8;  // queries per product with the basis
static_assert(PREPARED_PAGES * QUERIES % ROWS == 0);
constexpr int BEFORE_MIDDLE = padded(PAGE / 2);  // tokens before the middle of a page, padded
constexpr int SLOTS = 16, VECTORS_PER_WORD = SLOTS / LANES;  // tokens per four-byte word, and vectors of them
constexpr int ACCUMULATORS = LANES > 8 ? 2 : 1;  // independent sums, to hide latency
constexpr int VECTORS_OF_BLOCK = (BLOCK + LANES - 1) / LANES;
constexpr int SUMS = LANES > 8 ? 16 : 8;  // of a product; more do not fit into registers

// Positions of the tokens of a rank: in the rank (slot), and in the words of a field (bit positions pair and single). A
// word has all tokens of up to four rows of pairs.
template <int RANK>
struct Words {
    static constexpr int rows() {
        int rows = 4;
        while (RANKS[RANK].quarter() % rows) rows--;
        return rows;
    }
    static constexpr int COUNT = RANKS[RANK].quarter() / rows();
    int32_t slot[COUNT][SLOTS], pair[COUNT][SLOTS], single[COUNT][SLOTS];

    constexpr Words() : slot{}, pair{}, single{} {
        for (int word = 0; word < COUNT; word++)
            for (int i = 0; i < SLOTS; i++) {
                const int plane = i / rows() % 4, row = i % rows();
                const int t = plane * RANKS[RANK].quarter() + word * rows() + row;
                slot[word][i] = t;
                pair[word][i] = 8 * row + 2 * plane;
                single[word][i] = 8 * row + t / RANKS[RANK].eighth();
            }
    }
};

template <int RANK>
const Words<RANK> WORDS;

// Combines the bytes of ROWS rows from first on (modulo rows) to one word per field. row_bytes: bytes per row.
template <int ROWS>
inline void to_words(const uint8_t* bytes, int first, int rows, int row_bytes, int fields, int32_t* words) {
    for (int f = 0; f < fields; f += LANES) {
        Ints word = {};
        UNROLLED for (int row = 0; row < ROWS; row++)
            word |= widened(bytes + (first + row) % rows * row_bytes + f) << 8 * row;
        std::memcpy(words + f, &word, sizeof(word));
    }
}

// The basis and places of a head in the form that the loops here need: transposed blocks of the basis, and the
// coordinate and weight of each field, in padded arrays.
struct Head {
    alignas(Floats) float columns[HEAD * BLOCK + LANES];
    int32_t coordinate[FIELDS] = {};
    Field fields[FIELDS];
    int vectors[HEAD / BLOCK][VECTORS_OF_BLOCK], used[HEAD / BLOCK] = {};  // of each block, those that have fields
    Layout layout;

    template <typename Basis>
    Head(const Basis* basis, const Fields* places, const float* weights, const Layout& layout) : layout(layout) {
        for (int block = 0; block < HEAD; block += BLOCK) {
            const Basis* own = basis + block * BLOCK;
            float* to = columns + block * BLOCK;
            if constexpr (BLOCK % LANES == 0) {
                for (int i = 0; i < BLOCK; i += LANES)
                    for (int c = 0; c < BLOCK; c += LANES) {
                        Floats tile[LANES];
                        UNROLLED for (int k = 0; k < LANES; k++) tile[k] = read(own + (i + k) * BLOCK + c);
                        transpose(tile);
                        UNROLLED for (int k = 0; k < LANES; k++) store(to + (c + k) * BLOCK + i, tile[k]);
                    }
            } else {
                for (int i = 0; i < BLOCK * BLOCK; i++) to[i % BLOCK * BLOCK + i / BLOCK] = number(own[i]);
            }
        }
        bool is_used[HEAD] = {};
        for_each_field(places, [&](int field, int of, int kind, float zero, int) {
            coordinate[field] = of;
            fields[field] = Field(weights[kind], zero);
            is_used[of] = true;
        });
        for (int c = 0; c < HEAD; c += BLOCK)
            for (int i = 0; i < BLOCK; i += LANES)
                if (std::any_of(is_used + c + i, is_used + c + std::min(i + LANES, BLOCK), [](bool x) { return x; }))
                    vectors[c / BLOCK][used[c / BLOCK]++] = i;
    }

    // The products of ROWS queries with the basis: the score of a unit step in each coordinate that has fields.
    void steps(const float* q, float* found) const {
        constexpr int AT_ONCE = std::max(1, std::min(SUMS / ROWS, VECTORS_OF_BLOCK));
        for (int block = 0; block < HEAD / BLOCK; block++) {
            int v = 0;
            for (; v + AT_ONCE <= used[block]; v += AT_ONCE) steps_of<AT_ONCE>(q, block, vectors[block] + v, found);
            for (; v < used[block]; v++) steps_of<1>(q, block, vectors[block] + v, found);
        }
    }

    // Those of COUNT vectors of a block. starts: their first coordinates.
    template <int COUNT>
    void steps_of(const float* q, int block, const int* starts, float* found) const {
        Floats total[ROWS][COUNT] = {};
        const float *column = columns + block * BLOCK * BLOCK, *channel = q + block * BLOCK;
        for (int c = 0; c < BLOCK; c++, column += BLOCK, channel++)
            UNROLLED for (int v = 0; v < COUNT; v++) {
                const Floats own = load<Floats>(column + starts[v]);
                UNROLLED for (int r = 0; r < ROWS; r++) total[r][v] += channel[r * HEAD] * own;
            }
        for (int r = 0; r < ROWS; r++)
            UNROLLED for (int v = 0; v < COUNT; v++) {
                float* to = found + r * HEAD + block * BLOCK + starts[v];
                if constexpr (BLOCK % LANES == 0)
                    store(to, total[r][v]);
                else
                    std::memcpy(to, &total[r][v], std::min(LANES, BLOCK - starts[v]) * sizeof(float));
            }
    }

    // Adds the scores of COUNT queries for count fields of BITS bits from first on, for the tokens of a word.
    template <int COUNT, int BITS>
    void add(
        const int32_t* words, int first, int count, const int32_t* shifts, const float* steps,
        Floats (&total)[ACCUMULATORS][VECTORS_PER_WORD][COUNT]
    ) const {
        Ints shift[VECTORS_PER_WORD];
        std::memcpy(shift, shifts, sizeof(shift));
#if LANES == 16
        asm("" : "+v"(shift[0]));  // keep it in a register: loads are the bottleneck
#endif
        Floats sum[ACCUMULATORS][VECTORS_PER_WORD][COUNT];  // a copy, so that it stays in registers
        std::memcpy(sum, total, sizeof(sum));
        for (int f = 0; f < count; f += ACCUMULATORS)
            UNROLLED for (int accumulator = 0; accumulator < ACCUMULATORS; accumulator++) {
                const int at = first + f + accumulator;
                const float* step = steps + coordinate[at];
                UNROLLED for (int v = 0; v < VECTORS_PER_WORD; v++) {
                    const Floats field = fields[at].template of<BITS>(words[f + accumulator] >> shift[v]);
                    UNROLLED for (int r = 0; r < COUNT; r++) sum[accumulator][v][r] += field * step[r * HEAD];
                }
            }
        std::memcpy(total, sum, sizeof(sum));
    }

    // The scores of COUNT queries for the tokens of one word of a rank.
    template <int RANK, int COUNT>
    void scores(const uint8_t* page, int word, const float* steps, const float* gains, float* found) const {
        constexpr Rank own = RANKS[RANK];
        const Place& place = layout[RANK];
        const Words<RANK>& positions = WORDS<RANK>;
        constexpr int ROWS_PER_WORD = Words<RANK>::rows();
        alignas(Floats) int32_t words[own.end_field() - own.first_field];
        int32_t* single_words = words + padded(own.pairs);
        const int first = word * ROWS_PER_WORD;
        to_words<ROWS_PER_WORD>(page + place.pairs_at, first, own.quarter(), place.pairs_row, place.pairs, words);
        to_words<ROWS_PER_WORD>(
            page + place.singles_at, first, own.eighth(), place.singles_row, place.singles, single_words
        );
        Floats total[ACCUMULATORS][VECTORS_PER_WORD][COUNT] = {};
        add<COUNT, 2>(words, own.first_field, place.pairs, positions.pair[word], steps, total);
        add<COUNT, 1>(single_words, own.of_singles(), place.singles, positions.single[word], steps, total);
        for (int r = 0; r < COUNT; r++)
            UNROLLED for (int v = 0; v < VECTORS_PER_WORD; v++) {
                Floats x = total[0][v][r];
                if (ACCUMULATORS > 1) x += total[ACCUMULATORS - 1][v][r];
                if constexpr (own.tokens == SLOTS) {
                    store(found + r * PAGE + v * LANES, x * load<Floats>(gains + v * LANES));
                } else {
                    float each[LANES];
                    store(each, x);
                    for (int i = 0; i < LANES; i++) {
                        const int t = positions.slot[word][v * LANES + i];
                        found[r * PAGE + t] = each[i] * gains[t];
                    }
                }
            }
    }
};

// Calls act(kind, first, second, i) for rotary pairs from i on, LANES pairs at a time if their channels are adjacent,
// otherwise one by one. The channels of pair i are i * STRIDE and i * STRIDE + apart.
template <int STRIDE, typename Do>
inline void for_each_pair(int pairs, int apart, Do act) {
    int i = 0;
    if constexpr (STRIDE == 1)
        for (; i + LANES <= pairs; i += LANES) act(Floats{}, i, i + apart, i);
    for (; i < pairs; i++) act(0.0f, i * STRIDE, i * STRIDE + apart, i);
}

inline Floats as(Floats, const float* from) { return load<Floats>(from); }
inline float as(float, const float* from) { return *from; }
template <typename Table>
inline Floats read_as(Floats, const Table* from) { return read(from); }
template <typename Table>
inline float read_as(float, const Table* from) { return number(*from); }
inline void put(float* to, Floats x) { store(to, x); }
inline void put(float* to, float x) { *to = x; }
inline void add_to(Floats& sum, float&, Floats x) { sum += x; }
inline void add_to(Floats&, float& sum, float x) { sum += x; }

template <size_t... LANE>
inline Floats backwards(Floats x, std::index_sequence<LANE...>) {
#if defined(__clang__)
    return __builtin_shufflevector(x, x, int(LANES - 1 - LANE)...);
#else
    return __builtin_shuffle(x, Ints{int(LANES - 1 - LANE)...});
#endif
}
inline Floats backwards(Floats x) { return backwards(x, std::make_index_sequence<LANES>()); }

// The scores with the mean for the VECTORS * LANES tokens from t on, and for those as far after the middle.
template <int VECTORS>
inline void put_mean_scores(
    const float (&along)[ROWS][HEAD], const float (&across)[ROWS][HEAD], const float* rest, const float* cos,
    const float* sin, int pairs, int t, float* found
) {
    Floats even[ROWS][VECTORS] = {}, odd[ROWS][VECTORS] = {};
    for (int i = 0; i < pairs; i++)
        UNROLLED for (int v = 0; v < VECTORS; v++) {
            const Floats c = load<Floats>(cos + i * BEFORE_MIDDLE + v * LANES);
            UNROLLED for (int r = 0; r < ROWS; r++) even[r][v] += along[r][i] * c;
        }
    for (int i = 0; i < pairs; i++)
        UNROLLED for (int v = 0; v < VECTORS; v++) {
            const Floats s = load<Floats>(sin + i * BEFORE_MIDDLE + v * LANES);
            UNROLLED for (int r = 0; r < ROWS; r++) odd[r][v] += across[r][i] * s;
        }
    for (int r = 0; r < ROWS; r++)
        UNROLLED for (int v = 0; v < VECTORS; v++) {
            const int first = t + v * LANES;
            float* own = found + r * PAGE;
            const Floats before = even[r][v] + odd[r][v] + rest[r], after = even[r][v] - odd[r][v] + rest[r];
            if constexpr (PAGE / 2 % LANES == 0) {
                store(own + first, before);
                // Stores one value too many, into the next query's scores, which follow, or into padding.
                store(own + PAGE - first - (LANES - 1), backwards(after));
            } else {
                const int count = std::min(LANES, PAGE / 2 - first);
                for (int i = 0; i < count; i++) own[first + i] = before[i];
                for (int i = !first; i < count; i++) own[PAGE - first - i] = after[i];
            }
        }
}

// Scores of ROWS queries with the mean of the keys, rotated for each token of a page. The rotations after the middle
// mirror those before it. cos, sin: [pairs, BEFORE_MIDDLE], the rotations of the tokens before the middle.
template <int STRIDE>
inline void mean_scores(
    const float* q, const float* mean, const float* cos, const float* sin, int pairs, int apart, float* found
) {
    float along[ROWS][HEAD], across[ROWS][HEAD], rest[ROWS];
    for (int r = 0; r < ROWS; r++) {
        const float* own = q + r * HEAD;
        Floats all = {};
        float others = rest[r] = dot(own + 2 * pairs, mean + 2 * pairs, HEAD - 2 * pairs);
        for_each_pair<STRIDE>(pairs, apart, [&](auto kind, int first, int second, int i) {
            const auto a = as(kind, own + first), b = as(kind, own + second);
            const auto mean_a = as(kind, mean + first), mean_b = as(kind, mean + second);
            const auto both = a * mean_a + b * mean_b;
            add_to(all, others, both);
            put(along[r] + i, both);
            put(across[r] + i, b * mean_a - a * mean_b);
        });
        found[r * PAGE + PAGE / 2] = total(all) + others;
    }
    constexpr int AT_ONCE = std::max(1, std::min(SUMS / ROWS, BEFORE_MIDDLE / LANES));
    int t = 0;
    for (; t + AT_ONCE * LANES <= BEFORE_MIDDLE; t += AT_ONCE * LANES)
        put_mean_scores<AT_ONCE>(along, across, rest, cos + t, sin + t, pairs, t, found);
    for (; t < BEFORE_MIDDLE; t += LANES)
        put_mean_scores<1>(along, across, rest, cos + t, sin + t, pairs, t, found);
}

// Rotates a query back by the tables of a page's middle token.
template <int STRIDE, typename Table>
inline void rotate_back(const float* q, const Table* cos, const Table* sin, int pairs, int apart, float* out) {
    for_each_pair<STRIDE>(pairs, apart, [&](auto kind, int first, int second, int i) {
        const auto a = as(kind, q + first), b = as(kind, q + second);
        const auto c = read_as(kind, cos + i), s = read_as(kind, sin + i);
        put(out + first, a * c + b * s);
        put(out + second, b * c - a * s);
    });
    std::copy(q + 2 * pairs, q + HEAD, out + 2 * pairs);
}

// The rotations of page-relative RoPE; pairs = 0 means none. cos, sin: [pages, row], the rotations of the middle tokens
// of pages. relative_cos, relative_sin: [pairs, BEFORE_MIDDLE], the rotations of the tokens before the middle, relative
// to it.
template <typename Table>
struct PageRope {
    const Table *cos, *sin;
    int64_t row;
    int pairs, interleaved;
    const float *relative_cos, *relative_sin;
};

// Computes scores with consecutive pages of a head. mean: the mean that was subtracted from keys before rotary
// embedding, or null.
template <typename Table>
struct Scorer {
    const Head& head;
    const PageRope<Table>& rope;
    const float* mean;
    alignas(Floats) float rotated[PREPARED_PAGES * QUERIES * HEAD];
    alignas(Floats) float steps[PREPARED_PAGES * QUERIES * HEAD];
    alignas(Floats) float scores_of_mean[PREPARED_PAGES * QUERIES * PAGE + LANES] = {};
    alignas(Floats) float gains[PAGE + LANES] = {};
    alignas(Floats) float by_slot[QUERIES * PAGE + LANES];
    alignas(Floats) int32_t slots[PAGE + LANES] = {};

    Scorer(const Head& head, const PageRope<Table>& rope, const float* mean) : head(head), rope(rope), mean(mean) {}

    // Computes steps, and the scores with the mean, for up to PREPARED_PAGES pages from n on; pages end at end.
    void prepare_queries(const float* q, int64_t n, int64_t end) {
        const auto turn = rope.interleaved ? rotate_back<2, Table> : rotate_back<1, Table>;
        const auto with_mean = rope.interleaved ? mean_scores<2> : mean_scores<1>;
        const int apart = rope.interleaved ? 1 : rope.pairs;
        for (int i = 0; i < PREPARED_PAGES * QUERIES; i++) {
            const int64_t at = std::min(n + i / QUERIES, end - 1) * rope.row;
            turn(q + i % QUERIES * HEAD, rope.cos + at, rope.sin + at, rope.pairs, apart, rotated + i * HEAD);
        }
        for (int i = 0; i < PREPARED_PAGES * QUERIES; i += ROWS) {
            const float* query = rotated + i * HEAD;
            float* of_mean = scores_of_mean + i * PAGE;
            head.steps(query, steps + i * HEAD);
            if (mean) with_mean(query, mean, rope.relative_cos, rope.relative_sin, rope.pairs, apart, of_mean);
        }
    }

    // Scores of q [QUERIES, HEAD] with pages [begin, end). Those of query r with page n are written to found + r *
    // apart + (n - begin) * PAGE.
    template <typename Pages>
    void operator()(
        const float* q, const Pages& pages, int64_t room, int64_t begin, int64_t end, const float* table,
        float* found, int64_t apart
    ) {
        for (int64_t n = begin; n < end; n++, found += PAGE) {
            const int prepared = rope.pairs ? (n - begin) % PREPARED_PAGES : 0;
            if (rope.pairs ? !prepared : n == begin) prepare_queries(q, n, end);
            const Page page(pages, head.layout, n, room);
            find_gains(page.bytes, head.layout, table, gains);
            find_slots(page.bytes, head.layout, slots);
            for_each_run_of_queries([&](auto several, int r) {
                const float* query_steps = steps + (prepared * QUERIES + r) * HEAD;
                for_each_rank([&](auto rank) {
                    for (int word = 0; word < Words<rank.value>::COUNT; word++)
                        head.template scores<rank.value, several.value>(
                            page.bytes, word, query_steps, gains + first_token(rank),
                            by_slot + r * PAGE + first_token(rank)
                        );
                });
            });
            for (int r = 0; r < QUERIES; r++) {
                const float* of_mean = scores_of_mean + (prepared * QUERIES + r) * PAGE;
                for (int t = 0; t < PAGE; t += LANES) {
                    const Floats own = permuted<PAGE>(by_slot + r * PAGE, load<Ints>(slots + t));
                    const Floats x = own + load<Floats>(of_mean + t);
                    std::memcpy(found + r * apart + t, &x, std::min(LANES, PAGE - t) * sizeof(float));
                }
            }
        }
    }
};

}  // namespace
