// Quantizes tokens to points of E8 (kvpass/codec/lattice_points.py). Needs to_units.h.
//
// Macros: SHIFT: of all values of a point.
namespace {

constexpr int DIM = 8, MAGNITUDES = 256, CODES = HEAD / DIM;

struct Lattice {
    const float *magnitudes, *weights;  // [MAGNITUDES, DIM] and [MAGNITUDES], half of the squared norms
    const int32_t* odd;                 // [MAGNITUDES], whether their sum is

    // The magnitudes nearest to those of LANES vectors, and how close they are. size: one vector for each coordinate.
    // odd_signs: whether an odd number of values is negative.
    void nearest(const Floats* size, Ints odd_signs, Ints& which, Floats& best) const {
        which = Ints{};
        best = Floats{} - INFINITY;
        for (int m = 0; m < MAGNITUDES; m++) {
            Floats closeness = Floats{} - weights[m], least = Floats{} + INFINITY;
            UNROLLED for (int k = 0; k < DIM; k++) {
                const Floats product = size[k] * magnitudes[m * DIM + k];
                closeness = closeness + product;
                least = product < least ? product : least;
            }
            closeness = closeness - 2 * (odd_signs != odd[m] ? least : Floats{});
            which = closeness > best ? Ints{} + m : which;
            best = closeness > best ? closeness : best;
        }
    }

    // The code of a vector with its nearest magnitudes, before they are shifted.
    int code(const float* size, const bool* negative, int which) const {
        int cheapest = 0, parity = 0, signs = 0;
        float least = INFINITY;
        for (int k = 0; k < DIM; k++) {
            const float product = size[k] * magnitudes[which * DIM + k];
            if (product < least) cheapest = k, least = product;
            parity ^= negative[k];
        }
        for (int k = 0; k < DIM - 1; k++) signs |= (negative[k] ^ (k == cheapest && parity != odd[which])) << k;
        return which | signs << 8;
    }
};

// units: [DIM, count] of vectors, in units of the lattice. Puts the codes of LANES of them, from the first one on.
inline void assign(const Lattice& lattice, const float* units, int count, int first, int* codes) {
    Floats error = Floats{} + INFINITY;
    for (int side = 0; side < 2; side++) {
        const float shift = side ? SHIFT : -SHIFT;
        Floats size[DIM], energy = {}, best;
        Ints odd_signs = {}, which;
        for (int k = 0; k < DIM; k++) {
            const Floats x = load<Floats>(units + k * count + first), from = x - shift;
            size[k] = from < 0 ? -from : from;
            odd_signs ^= x < shift;  // all bits of a lane
            energy = energy + size[k] * size[k];
        }
        lattice.nearest(size, odd_signs & 1, which, best);
        const Floats own = energy - 2 * best;
        for (int lane = 0; lane < LANES; lane++) {
            if (!(own[lane] < error[lane])) continue;
            float of_lane[DIM];
            bool negative[DIM];
            for (int k = 0; k < DIM; k++) {
                of_lane[k] = size[k][lane];
                negative[k] = units[k * count + first + lane] < shift;
            }
            codes[lane] = lattice.code(of_lane, negative, which[lane]) | side << 15;
        }
        error = own < error ? own : error;
    }
}

}  // namespace

// x: [pages, PAGE, HEAD]. signs: [HEAD]. codes: [pages, PAGE, HEAD / 4], all low bytes before all high bytes of a token.
// scales: [pages, PAGE, GROUPS].
extern "C" void kernel(
    const uint8_t* x, const float* magnitudes, const float* weights, const int32_t* odd, const float* signs,
    uint8_t* codes, uint8_t* scales, int64_t pages, int64_t threads
) {
    constexpr int COUNT = PAGE * CODES;
    const Lattice lattice = {magnitudes, weights, odd};
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t page = 0; page < pages; page++) {
        static thread_local float units[DIM * COUNT];
        for (int t = 0; t < PAGE; t++) {
            const int64_t token = page * PAGE + t;
            to_units((const Token*)x + token * HEAD, signs, (Scale*)scales + token * GROUPS, [&](int i, float unit) {
                units[i % DIM * COUNT + t * CODES + i / DIM] = unit;
            });
        }
        for (int first = 0; first < COUNT; first += LANES) {
            int found[LANES] = {};
            assign(lattice, units, COUNT, first, found);
            for (int lane = 0; lane < LANES; lane++) {
                const int t = (first + lane) / CODES, c = (first + lane) % CODES;
                uint8_t* to = codes + (page * PAGE + t) * 2 * CODES;
                to[c] = found[lane];
                to[CODES + c] = found[lane] >> 8;
            }
        }
    }
}
