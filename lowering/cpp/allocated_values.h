// Sums of the values in pages, weighted for one query token. Needs allocated.h and tokens.h.

namespace {

// Adds LANES * VECTORS fields of BITS bits, each times the weight of its token, to total[query * FIELDS + field].
// row_bytes: bytes per row.
template <int BITS, int COUNT, int VECTORS>
inline void add_fields(const uint8_t* bytes, int rows, int row_bytes, const float* weights, float* total) {
    constexpr int PLANES = 8 / BITS, ONES = (1 << BITS) - 1;
    Floats sum[COUNT][VECTORS];
    for (int r = 0; r < COUNT; r++)
        for (int v = 0; v < VECTORS; v++) sum[r][v] = load<Floats>(total + r * FIELDS + v * LANES);
    for (int row = 0; row < rows; row++) {
        Ints loaded[VECTORS];
        UNROLLED for (int v = 0; v < VECTORS; v++) loaded[v] = widened(bytes + row * row_bytes + v * LANES);
        UNROLLED for (int plane = 0; plane < PLANES; plane++)
            UNROLLED for (int v = 0; v < VECTORS; v++) {
                const Floats field = numbers(loaded[v] & ONES << BITS * plane);
                UNROLLED for (int r = 0; r < COUNT; r++) sum[r][v] += field * weights[r * PAGE + plane * rows + row];
            }
    }
    for (int r = 0; r < COUNT; r++)
        for (int v = 0; v < VECTORS; v++) store(total + r * FIELDS + v * LANES, sum[r][v]);
}

// add_fields for all fields of a kind. weights: those of COUNT queries by slot, PAGE apart. REMAINING: vectors of
// fields.
template <int BITS, int COUNT, int REMAINING>
inline void add_kind(const uint8_t* bytes, int rows, int row_bytes, const float* weights, float* total) {
    if constexpr (REMAINING > 0) {  // as many at a time as fit into registers
        constexpr int VECTORS = REMAINING == 4 ? 2 : std::min(REMAINING, 3);
        add_fields<BITS, COUNT, VECTORS>(bytes, rows, row_bytes, weights, total);
        constexpr int DONE = VECTORS * LANES;
        add_kind<BITS, COUNT, REMAINING - VECTORS>(bytes + DONE, rows, row_bytes, weights, total + DONE);
    }
}

// add_fields for a number of fields that is known at run time.
template <int BITS, int COUNT>
inline void add_some(
    const uint8_t* bytes, int rows, int row_bytes, int fields, const float* weights, float* total
) {
    for (; fields > 2 * LANES; fields -= 3 * LANES, bytes += 3 * LANES, total += 3 * LANES)
        add_fields<BITS, COUNT, 3>(bytes, rows, row_bytes, weights, total);
    if (fields > LANES) add_fields<BITS, COUNT, 2>(bytes, rows, row_bytes, weights, total);
    else if (fields > 0) add_fields<BITS, COUNT, 1>(bytes, rows, row_bytes, weights, total);
}

// The weight of a field that is not shifted to the lowest bits of its byte, by slot of its token.
struct Units {
    alignas(Floats) float pair[PAGE + LANES] = {};
    alignas(Floats) float single[PAGE + LANES] = {};

    Units() {
        for_each_rank([&](auto rank) {
            constexpr Rank own = RANKS[rank.value];
            for (int t = 0; t < own.tokens; t++) {
                pair[first_token(rank) + t] = 1.0f / (1 << t / own.quarter() * 2);
                single[first_token(rank) + t] = 1.0f / (1 << t / own.eighth());
            }
        });
    }
};
const Units UNITS;

// Weighted sums of fields, and sums of the weights in each slot.
struct Total {
    alignas(Floats) float fields[QUERIES * FIELDS] = {};
    alignas(Floats) float weights[QUERIES * PAGE + LANES] = {};

    // Adds pages [begin, end). The weights of query r are at of_tokens + r * apart, in token order.
    template <typename Pages>
    void add_pages(
        const Pages& pages, const Layout& layout, int64_t room, int64_t begin, int64_t end, const float* table,
        const float* of_tokens, int64_t apart
    ) {
        alignas(Floats) int32_t order[PAGE + LANES] = {};
        alignas(Floats) float gains[PAGE + LANES] = {};
        for (int64_t n = begin; n < end; n++, of_tokens += PAGE) {
            const Page page(pages, layout, n, room);
            find_order(page.bytes, layout, order);
            find_gains(page.bytes, layout, table, gains);
            add(page.bytes, layout, order, gains, of_tokens, apart);
        }
    }

    // Multiplies the sums of query r by rescale.
    void scale(int r, float rescale) {
        for (float* own = fields + r * FIELDS; own < fields + (r + 1) * FIELDS; own++) *own *= rescale;
        for (float* own = weights + r * PAGE; own < weights + (r + 1) * PAGE; own++) *own *= rescale;
    }

    void add(const Total& other, int r, float rescale) {
        for (int i = r * FIELDS; i < (r + 1) * FIELDS; i++) fields[i] += other.fields[i] * rescale;
        for (int i = r * PAGE; i < (r + 1) * PAGE; i++) weights[i] += other.weights[i] * rescale;
    }

    // Converts the sums to channels and adds them to found [QUERIES, HEAD].
    template <typename Basis>
    void put(const Basis* basis, const Fields* fields_of, const float* table, float* found) const {
        float coordinates[QUERIES][HEAD] = {}, all[QUERIES][LAST + 1];
        for (int r = 0; r < QUERIES; r++)
            for (int rank = 0; rank <= LAST; rank++) {
                const float* own = weights + r * PAGE + first_token(rank);
                all[r][rank] = std::accumulate(own, own + RANKS[rank].tokens, 0.0f);
            }
        for_each_field(fields_of, [&](int field, int coordinate, int kind, float zero, int rank) {
            const float weight = table[GAINS + kind];
            UNROLLED for (int r = 0; r < QUERIES; r++)
                coordinates[r][coordinate] += weight * (fields[r * FIELDS + field] - zero * all[r][rank]);
        });
        constexpr int VECTORS = BLOCK / LANES;
        for (int block = 0; block < HEAD; block += BLOCK) {
            Floats sum[QUERIES][VECTORS + 1] = {};
            for (int i = block; i < block + BLOCK; i++) {
                float row[BLOCK];
                to_floats<BLOCK>(basis + i * BLOCK, row);
                UNROLLED for (int v = 0; v < VECTORS; v++)
                    UNROLLED for (int r = 0; r < QUERIES; r++)
                        sum[r][v] += load<Floats>(row + v * LANES) * coordinates[r][i];
                for (int c = VECTORS * LANES; c < BLOCK; c++)
                    for (int r = 0; r < QUERIES; r++) found[r * HEAD + block + c] += row[c] * coordinates[r][i];
            }
            for (int r = 0; r < QUERIES; r++)
                for (int v = 0; v < VECTORS; v++) {
                    float* own = found + r * HEAD + block + v * LANES;
                    store(own, load<Floats>(own) + sum[r][v]);
                }
        }
    }

  private:
    void add(
        const uint8_t* page, const Layout& layout, const int32_t* order, const float* gains, const float* of_tokens,
        int64_t apart
    ) {
        // Weights for fields that are not shifted.
        alignas(Floats) float of_pairs[QUERIES * PAGE + LANES];
        alignas(Floats) float of_singles[QUERIES * PAGE + LANES];
        for (int r = 0; r < QUERIES; r++)
            for (int t = 0; t < PAGE; t += LANES) {
                const int at = r * PAGE + t;
                const Floats in_order = permuted<PAGE>(of_tokens + r * apart, load<Ints>(order + t));
                const Floats own = in_order * load<Floats>(gains + t);
                store(weights + at, load<Floats>(weights + at) + own);
                store(of_pairs + at, own * load<Floats>(UNITS.pair + t));
                store(of_singles + at, own * load<Floats>(UNITS.single + t));
            }
        for_each_run_of_queries([&](auto several, int r) {
            for_each_rank([&](auto rank) {
                constexpr Rank own = RANKS[rank.value];
                constexpr int COUNT = several.value, FIRST = own.first_field, BEHIND = own.of_singles();
                const int first = r * PAGE + first_token(rank);
                float* found = fields + r * FIELDS;
                const Place& place = layout[rank.value];
                const uint8_t *pairs = page + place.pairs_at, *singles = page + place.singles_at;
                const float *of_2 = of_pairs + first, *of_1 = of_singles + first;
#if SHARED
                add_some<2, COUNT>(pairs, own.quarter(), place.pairs_row, place.pairs, of_2, found + FIRST);
                add_some<1, COUNT>(singles, own.eighth(), place.singles_row, place.singles, of_1, found + BEHIND);
#else
                constexpr int PAIRS = (BEHIND - FIRST) / LANES, SINGLES = (own.end_field() - BEHIND) / LANES;
                add_kind<2, COUNT, PAIRS>(pairs, own.quarter(), place.pairs_row, of_2, found + FIRST);
                add_kind<1, COUNT, SINGLES>(singles, own.eighth(), place.singles_row, of_1, found + BEHIND);
#endif
            });
        });
    }
};

}  // namespace
