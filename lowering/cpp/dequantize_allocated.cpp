// Dequantizes pages with per-channel bit widths (kvpass/codec/allocation.py, kvpass/codec/layer_pages.py). Needs
// allocated.h.
namespace {

// The coordinate and the weight of each field of a head, in padded arrays.
struct FieldTable {
    int coordinate[FIELDS + LANES] = {};
    float weight[FIELDS + LANES] = {};

    FieldTable(const Fields* fields, const float* weights) {
        for_each_field(fields, [&](int field, int of, int kind, float, int) {
            coordinate[field] = of, weight[field] = weights[kind];
        });
    }
};

// Adds count fields of BITS bits to the coordinates [tokens of the rank, HEAD]. coordinate, weight: those of the fields.
template <int BITS>
inline void add_fields(
    const uint8_t* bytes, int rows, int row_bytes, int count, const int* coordinate, const float* weight,
    float* coordinates
) {
    constexpr int PLANES = 8 / BITS, ONES = (1 << BITS) - 1;
    for (int row = 0; row < rows; row++)
        for (int first = 0; first < count; first += LANES) {
            const Ints loaded = widened(bytes + row * row_bytes + first);
            const Floats weights = load<Floats>(weight + first);
            const int stop = std::min(LANES, count - first);
            for (int plane = 0; plane < PLANES; plane++) {
                float added[LANES];
                store(added, (numbers(loaded >> BITS * plane & ONES) - (BITS == 2 ? PAIR : SINGLE)) * weights);
                float* own = coordinates + (plane * rows + row) * HEAD;
                for (int i = 0; i < stop; i++) own[coordinate[first + i]] += added[i];
            }
        }
}

// The channels of COUNT tokens: their coordinates times the basis, times their gains.
template <int COUNT>
inline void put_tokens(const float* const* coordinates, const float* gains, const float* basis, float* out) {
    constexpr int VECTORS = BLOCK / LANES;
    for (int block = 0; block < HEAD; block += BLOCK) {
        Floats sum[COUNT][VECTORS + 1] = {};
        float rest[COUNT][LANES] = {};
        for (int i = block; i < block + BLOCK; i++) {
            const float* row = basis + i * BLOCK;
            UNROLLED for (int v = 0; v < VECTORS; v++)
                UNROLLED for (int t = 0; t < COUNT; t++)
                    sum[t][v] += load<Floats>(row + v * LANES) * coordinates[t][i];
            for (int c = VECTORS * LANES; c < BLOCK; c++)
                for (int t = 0; t < COUNT; t++) rest[t][c - VECTORS * LANES] += row[c] * coordinates[t][i];
        }
        for (int t = 0; t < COUNT; t++) {
            float* own = out + t * HEAD + block;
            for (int v = 0; v < VECTORS; v++) store(own + v * LANES, sum[t][v] * gains[t]);
            for (int c = VECTORS * LANES; c < BLOCK; c++) own[c] = rest[t][c - VECTORS * LANES] * gains[t];
        }
    }
}

}  // namespace

// pages: [samples, heads, count, PAGE_BYTES], or [samples, count, bytes] with SHARED. basis: [samples or 1, heads, HEAD,
// BLOCK]. fields: [samples or 1, heads, NUM_FIELDS]; fitted is 1 if they and basis are per sample. table: gains, then
// weights of fields. out: [samples, heads, count * PAGE, HEAD].
extern "C" void kernel(
    const uint8_t* pages, const float* basis, const Fields* fields, const float* table, float* out, int64_t samples,
    int64_t heads, int64_t count, int64_t fitted, int64_t threads
) {
    constexpr int TOKENS = 4;  // at a time
    const Layouts layouts(fields, fitted ? samples : 1, heads);
    const int64_t parts = parts_of(count, threads);
#pragma omp parallel for collapse(2) num_threads(threads) if (threads > 1)
    for (int64_t i = 0; i < samples * heads; i++)
        for (int64_t part = 0; part < parts; part++) {
            const int64_t head = i % heads, own = fitted ? i : head;
            const Layout layout = layouts.of(fitted ? i / heads : 0, head);
            const FieldTable of_head(fields + own * PLACES_OF_HEAD, table + GAINS);
            const uint8_t* pool = pages + (SHARED ? i / heads : i) * count * layout.bytes;
            for (int64_t n = part * count / parts; n < (part + 1) * count / parts; n++) {
                const Page page(pool, layout, n, count);
                float gains[PAGE + LANES] = {}, coordinates[PAGE * HEAD] = {};
                int32_t slots[PAGE + LANES] = {};
                find_slots(page.bytes, layout, slots);
                find_gains(page.bytes, layout, table, gains);
                for_each_rank([&](auto rank) {
                    constexpr Rank of = RANKS[rank.value];
                    const Place at = layout[rank.value];
                    const auto add = [&](auto bits, int byte, int rows, int row_bytes, int some, int first) {
                        add_fields<bits.value>(
                            page.bytes + byte, rows, row_bytes, some, of_head.coordinate + first,
                            of_head.weight + first, coordinates + first_token(rank) * HEAD
                        );
                    };
                    add(std::integral_constant<int, 2>(), at.pairs_at, of.quarter(), at.pairs_row, at.pairs,
                        of.first_field);
                    add(std::integral_constant<int, 1>(), at.singles_at, of.eighth(), at.singles_row, at.singles,
                        of.of_singles());
                });
                for (int t = 0; t < PAGE; t += TOKENS) {
                    const float* of_tokens[TOKENS];
                    float own_gains[TOKENS];
                    for (int k = 0; k < TOKENS; k++)
                        of_tokens[k] = coordinates + slots[t + k] * HEAD, own_gains[k] = gains[slots[t + k]];
                    float* to = out + ((i * count + n) * PAGE + t) * HEAD;
                    put_tokens<TOKENS>(of_tokens, own_gains, basis + own * HEAD * BLOCK, to);
                }
            }
        }
}
