// Quantizes tokens to the points of a grid (kvpass/codec/codebook.py). Needs to_units.h and unpack.h.
//
// Macros: BITS: bit width of a code. DIM: channels that it stands for. POINTS: of the grid.
namespace {

constexpr int COLUMNS = HEAD / DIM;

struct Grid {
    const float *points, *weights;  // [DIM, POINTS] and [POINTS], half of the squared norms

    // The nearest points of LANES vectors, of which x has one vector for each coordinate.
    Ints nearest(const Floats* x) const {
        Ints found = {};
        Floats best = Floats{} - INFINITY;
        for (int i = 0; i < POINTS; i++) {
            Floats closeness = Floats{} - weights[i];
            UNROLLED for (int k = 0; k < DIM; k++) closeness = closeness + x[k] * points[k * POINTS + i];
            found = closeness > best ? Ints{} + i : found;
            best = closeness > best ? closeness : best;
        }
        return found;
    }
};

// codes: [COLUMNS]. scales: [GROUPS].
inline void quantize(const Token* token, const Grid& grid, const float* signs, uint8_t* codes, Scale* scales) {
    float units[DIM][COLUMNS];
    to_units(token, signs, scales, [&](int i, float x) { units[i % DIM][i / DIM] = x; });
    for (int c = 0; c < COLUMNS; c += LANES) {
        Floats own[DIM];
        for (int k = 0; k < DIM; k++) own[k] = load<Floats>(units[k] + c);
        const Ints found = grid.nearest(own);
        for (int i = 0; i < LANES; i++) codes[c + i] = found[i];
    }
}

// Packs bits [SHIFT, SHIFT + WIDTH) of the codes [PAGE, COLUMNS] of a page.
template <int WIDTH, int SHIFT>
inline void pack(const uint8_t* codes, uint8_t* page) {
    constexpr int PLANES = 8 / WIDTH, COUNT = PAGE / PLANES * COLUMNS, ONES = (1 << WIDTH) - 1;
    for (int i = 0; i < COUNT; i++) {
        int byte = 0;
        for (int plane = 0; plane < PLANES; plane++)
            byte |= (codes[plane * COUNT + i] >> SHIFT & ONES) << plane * WIDTH;
        page[i] = byte;
    }
}

}  // namespace

// x: [pages, PAGE, HEAD]. signs: [HEAD]. codes: [pages, PAGE * BITS / 8, COLUMNS]. scales: [pages, PAGE, GROUPS].
extern "C" void kernel(
    const uint8_t* x, const float* points, const float* weights, const float* signs, uint8_t* codes, uint8_t* scales,
    int64_t pages, int64_t threads
) {
    constexpr int LOW = first_field(BITS);
    const Grid grid = {points, weights};
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t page = 0; page < pages; page++) {
        uint8_t own[PAGE * COLUMNS], *to = codes + page * (PAGE * BITS / 8 * COLUMNS);
        for (int t = 0; t < PAGE; t++) {
            const int64_t token = page * PAGE + t;
            quantize((const Token*)x + token * HEAD, grid, signs, own + t * COLUMNS, (Scale*)scales + token * GROUPS);
        }
        pack<LOW, 0>(own, to);
        if constexpr (LOW < BITS) pack<BITS - LOW, LOW>(own, to + PAGE * LOW / 8 * COLUMNS);
    }
}
