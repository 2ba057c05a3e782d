// Quantizes tokens to the points of a grid (kvpass/codec/codebook.py), rotated or not (kvpass/codec/hadamard.py). Needs
// tokens.h and unpack.h, and a build that does not fuse products and sums, so that codes are those of the reference.
//
// Macros: BITS: bit width of a code. DIM: channels that it stands for. POINTS: of the grid. GROUP: channels that share
// a scale. ROTATED: whether tokens are rotated.
namespace {

constexpr int COLUMNS = HEAD / DIM, GROUPS = HEAD / GROUP;

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

// Sylvester's matrix, in runs of the largest power of two that divides HEAD.
inline void rotate(float* x, const float* signs) {
    constexpr int SIZE = HEAD & -HEAD;
    for (int i = 0; i < HEAD; i++) x[i] *= signs[i];
    for (int half = 1; half < SIZE; half *= 2) {
        float next[HEAD];
        for (int start = 0; start < HEAD; start += 2 * half)
            for (int i = start; i < start + half; i++) {
                next[i] = x[i] + x[i + half];
                next[i + half] = x[i] - x[i + half];
            }
        std::copy_n(next, HEAD, x);
    }
    for (int i = 0; i < HEAD; i++) x[i] /= std::sqrt((float)SIZE);
}

// codes: [COLUMNS]. scales: [GROUPS].
inline void quantize(const Token* token, const Grid& grid, const float* signs, uint8_t* codes, Scale* scales) {
    float x[HEAD], units[DIM][COLUMNS];
    to_floats<HEAD>(token, x);
    if (ROTATED) rotate(x, signs);
    for (int g = 0; g < GROUPS; g++) {
        double squares = 0;
        for (int i = g * GROUP; i < (g + 1) * GROUP; i++) squares += (double)x[i] * x[i];
        round_to(scales[g], (float)std::sqrt(squares / GROUP));
        const float scale = number(scales[g]), by = scale > 0 ? scale : 1;
        for (int i = g * GROUP; i < (g + 1) * GROUP; i++) units[i % DIM][i / DIM] = x[i] / by;
    }
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
