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

// The same for all fields of a kind. by_slot: weights of COUNT queries, PAGE apart. LEFT: vectors of fields.
template <int BITS, int COUNT, int LEFT>
inline void add_kind(const uint8_t* bytes, int rows, int fields, const float* weights, float* total) {
    if constexpr (LEFT > 0) {  // as many at once as there are registers for
        constexpr int MANY = LEFT == 4 ? 2 : std::min(LEFT, 3);
        add_fields<BITS, COUNT, MANY>(bytes, rows, fields, weights, total);
        add_kind<BITS, COUNT, LEFT - MANY>(bytes + MANY * LANES, rows, fields, weights, total + MANY * LANES);
    }
}

// What a field counts that stays where it is in its byte, by the token in a page.
struct Units {
    float pair[PAGE + LANES] = {}, single[PAGE + LANES] = {};

    Units() {
        each_rank([&](auto rank) {
            constexpr Rank own = RANKS[rank.value];
            for (int t = 0; t < own.tokens; t++) {
                pair[first_token(rank) + t] = 1.0f / (1 << t / own.quarter() * 2);
                single[first_token(rank) + t] = 1.0f / (1 << t / own.eighth());
            }
        });
    }
};
const Units UNITS;

struct Total {
    float fields[QUERIES * FIELDS] = {}, weights[QUERIES * PAGE + LANES] = {};

    void add(const uint8_t* page, const int32_t* order, const float* gains, const float* of_tokens, int64_t apart) {
        float of_pairs[QUERIES * PAGE + LANES], of_singles[QUERIES * PAGE + LANES];  // for fields that are not shifted
        for (int r = 0; r < QUERIES; r++)
            for (int t = 0; t < PAGE; t += LANES) {
                const int at = r * PAGE + t;
                const Floats own = picked<PAGE>(of_tokens + r * apart, order + t) * load<Floats>(gains + t);
                store(weights + at, load<Floats>(weights + at) + own);
                store(of_pairs + at, own * load<Floats>(UNITS.pair + t));
                store(of_singles + at, own * load<Floats>(UNITS.single + t));
            }
        each_queries([&](auto several, int r) {
            each_rank([&](auto rank) {
                constexpr Rank own = RANKS[rank.value];
                constexpr int COUNT = several.value, FIRST = own.first_field, BEHIND = own.of_singles();
                constexpr int PAIRS = (BEHIND - FIRST) / LANES, SINGLES = (own.end_field() - BEHIND) / LANES;
                const int first = r * PAGE + first_token(rank);
                float* found = fields + r * FIELDS;
                const uint8_t *pairs = page + own.first_byte, *singles = page + own.singles_byte();
                add_kind<2, COUNT, PAIRS>(pairs, own.quarter(), own.pairs, of_pairs + first, found + FIRST);
                add_kind<1, COUNT, SINGLES>(singles, own.eighth(), own.singles, of_singles + first, found + BEHIND);
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
            int32_t slots[PAGE + LANES], order[PAGE + LANES] = {};
            float gains[PAGE + LANES] = {};
            for (int64_t n = part * count / parts; n < (part + 1) * count / parts; n++) {
                const Page page(pages + h * room * PAGE_BYTES, n, room);
                find_slots(page.bytes, slots);
                for (int t = 0; t < PAGE; t++) order[slots[t]] = t;
                find_gains(page.bytes, table, gains);
                const float* mine = weights + (h * QUERIES * count + n) * PAGE;
                totals[h * parts + part].add(page.bytes, order, gains, mine, count * PAGE);
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
