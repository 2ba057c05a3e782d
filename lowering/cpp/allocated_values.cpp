// Values in pages, weighted by one query token. allocated.h comes ahead.

namespace {

// Adds to total[query * FIELDS + field] LANES * MANY fields of BITS bits, each times the weight of its token.
template <int BITS, int COUNT, int MANY>
inline void add_fields(const uint8_t* bytes, int rows, int fields, const float* weights, float* total) {
    constexpr int PLANES = 8 / BITS, ONES = (1 << BITS) - 1;
    Floats sum[COUNT][MANY];
    for (int r = 0; r < COUNT; r++)
        for (int v = 0; v < MANY; v++) sum[r][v] = load<Floats>(total + r * FIELDS + v * LANES);
    for (int row = 0; row < rows; row++) {
        Ints some[MANY];
        UNROLLED for (int v = 0; v < MANY; v++) some[v] = widened(bytes + row * fields + v * LANES);
        UNROLLED for (int plane = 0; plane < PLANES; plane++)
            UNROLLED for (int v = 0; v < MANY; v++) {
                const Floats field = numbers(some[v] & ONES << BITS * plane);
                UNROLLED for (int r = 0; r < COUNT; r++) sum[r][v] += field * weights[r * PAGE + plane * rows + row];
            }
    }
    for (int r = 0; r < COUNT; r++)
        for (int v = 0; v < MANY; v++) store(total + r * FIELDS + v * LANES, sum[r][v]);
}

// The same for all fields of a kind. by_slot: weights of COUNT queries, PAGE apart.
template <int BITS, int COUNT>
inline void add_kind(const uint8_t* bytes, int rows, int fields, const float* by_slot, float* total) {
    float weights[COUNT * PAGE];  // for fields that are not shifted
    for (int r = 0; r < COUNT; r++)
        for (int plane = 0; plane < 8 / BITS; plane++)
            for (int t = plane * rows; t < (plane + 1) * rows; t++)
                weights[r * PAGE + t] = by_slot[r * PAGE + t] * (1.0f / (1 << BITS * plane));
    int f = 0;
    for (; f + LANES < fields; f += 2 * LANES)
        add_fields<BITS, COUNT, 2>(bytes + f, rows, fields, weights, total + f);
    if (f < fields) add_fields<BITS, COUNT, 1>(bytes + f, rows, fields, weights, total + f);
}

struct Total {
    float fields[QUERIES * FIELDS] = {}, weights[QUERIES * PAGE] = {};

    void add(const uint8_t* page, const int32_t* order, const float* gain, const float* of_tokens, int64_t apart) {
        float gains[PAGE], by_slot[QUERIES * PAGE];
        each_rank([&](auto rank) {
            constexpr Rank own = RANKS[rank.value];
            for (int t = 0; t < own.tokens; t++) gains[first_token(rank) + t] = gain[page[own.gains_byte() + t]];
        });
        for (int r = 0; r < QUERIES; r++) {
            for (int t = 0; t < PAGE; t++) by_slot[r * PAGE + t] = of_tokens[r * apart + order[t]] * gains[t];
            for (int t = 0; t < PAGE; t++) weights[r * PAGE + t] += by_slot[r * PAGE + t];
        }
        each_queries([&](auto several, int r) {
            each_rank([&](auto rank) {
                constexpr Rank own = RANKS[rank.value];
                constexpr int COUNT = several.value;
                const float* mine = by_slot + r * PAGE + first_token(rank);
                float* found = fields + r * FIELDS;
                const uint8_t *pairs = page + own.first_byte, *singles = page + own.singles_byte();
                add_kind<2, COUNT>(pairs, own.quarter(), own.pairs, mine, found + own.first_field);
                add_kind<1, COUNT>(singles, own.eighth(), own.singles, mine, found + own.of_singles());
            });
        });
    }
};

}  // namespace

// weights: [BH, R, count * PAGE]. out: [BH, R, D], for BH = many. The rest is that of allocated_scores.cpp.
extern "C" void kernel(
    const float* weights, const uint8_t* pages, const float* basis, const int32_t* places, const float* table,
    float* out, int64_t many, int64_t count, int64_t room, int64_t threads
) {
    const int64_t parts = parts_of(count, threads);
    std::vector<Total> totals(many * parts);
#pragma omp parallel for collapse(2) num_threads(threads) if (threads > 1)
    for (int64_t h = 0; h < many; h++)
        for (int64_t part = 0; part < parts; part++) {
            int32_t order[PAGE] = {};
            for (int64_t n = part * count / parts; n < (part + 1) * count / parts; n++) {
                const Page page(pages + h * room * PAGE_BYTES, n, room);
                find_order(page.bytes, order);
                const float* mine = weights + (h * QUERIES * count + n) * PAGE;
                totals[h * parts + part].add(page.bytes, order, table, mine, count * PAGE);
            }
        }
    for (int64_t row = 0; row < many * QUERIES; row++) {
        const int64_t h = row / QUERIES, r = row % QUERIES;
        float coordinates[HEAD] = {}, *found = out + row * HEAD;
        for (int64_t part = 0; part < parts; part++) {
            const Total& total = totals[h * parts + part];
            float all[LAST + 1];
            for (int rank = 0; rank <= LAST; rank++) {
                const float* own = total.weights + r * PAGE + first_token(rank);
                all[rank] = std::accumulate(own, own + RANKS[rank].tokens, 0.0f);
            }
            each_field([&](int field, int at, float zero, int rank) {
                const int32_t place = places[h * NUM_FIELDS + at];
                const float sum = total.fields[r * FIELDS + field] - zero * all[rank];
                coordinates[place % HEAD] += table[GAINS + place / HEAD] * sum;
            });
        }
        std::fill(found, found + HEAD, 0.0f);
        for (int i = 0; i < HEAD; i++)
            for (int c = 0; c < BLOCK; c++)
                found[i / BLOCK * BLOCK + c] += coordinates[i] * basis[(h * HEAD + i) * BLOCK + c];
    }
}
