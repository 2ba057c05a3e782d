// Pages of keys with per-channel scales and of values with per-token scales. Needs tokens.h and unpack.h.
//
// Macros: KEY_BITS and VALUE_BITS: bit widths. KEY_GROUP: tokens that share the scale of a channel. VALUE_GROUP:
// channels of a value that share a scale.
namespace {

constexpr int VECTORS = HEAD / LANES, KEY_GROUPS = PAGE / KEY_GROUP, GROUPS = HEAD / VALUE_GROUP;

// Bit width of the fields that codes are read from: those of several fields are unpacked first.
constexpr int width_of(int bits) { return first_field(bits) < bits ? 8 : bits; }

// The weight of the codes of each token. Codes are masked but not shifted.
template <int BITS>
struct Units {
    float of[PAGE];
    constexpr Units() : of() {
        for (int t = 0; t < PAGE; t++) of[t] = 1.0f / (1 << t / (PAGE * BITS / 8) * BITS);
    }
};

struct Codes : RunningSoftmax {
    static constexpr int64_t KEYS = PAGE * KEY_BITS / 8 * HEAD, VALUES = PAGE * VALUE_BITS / 8 * HEAD;
    static constexpr int64_t KEY_PARAMS = KEY_GROUPS * HEAD * sizeof(Scale);
    static constexpr int64_t VALUE_PARAMS = PAGE * GROUPS * sizeof(Scale);
    static constexpr int64_t BYTES[6] = {KEYS, KEY_PARAMS, KEY_PARAMS, VALUES, VALUE_PARAMS, VALUE_PARAMS};

    float scores[QUERIES * PAGE];

    using RunningSoftmax::RunningSoftmax;

    template <typename Context>
    void begin(const Context&, int64_t, int64_t) {}

    // The page itself or, if codes have several fields, room with a byte for each.
    template <int BITS>
    static const uint8_t* fields(const uint8_t* page, uint8_t* room) {
        if constexpr (width_of(BITS) == BITS) return page;
        else return unpack<BITS, HEAD>(page, room);
    }

    void score_page(const uint8_t* page, const Scale* scales, const Scale* zeros) {
        constexpr int BITS = width_of(KEY_BITS), PLANES = 8 / BITS, ROWS = PAGE / PLANES, ONES = (1 << BITS) - 1;
        static constexpr Units<BITS> units;
        uint8_t room[PAGE * HEAD];
        const uint8_t* codes = fields<KEY_BITS>(page, room);
        Floats scaled_query[KEY_GROUPS][QUERIES][VECTORS], zero[KEY_GROUPS][QUERIES] = {};
        for (int g = 0; g < KEY_GROUPS; g++)
            for (int v = 0; v < VECTORS; v++) {
                const int at = g * HEAD + v * LANES;
                const Floats scale = read(scales + at), zero_point = read(zeros + at);
                for (int r = 0; r < QUERIES; r++) {
                    const Floats own = load<Floats>(q + r * HEAD + v * LANES);
                    scaled_query[g][r][v] = own * scale;
                    zero[g][r] += own * zero_point;
                }
            }
        for (int row = 0; row < ROWS; row++) {
            Floats found[PLANES][QUERIES] = {};
            UNROLLED for (int v = 0; v < VECTORS; v++) {
                const Ints loaded = widened(codes + row * HEAD + v * LANES);
                UNROLLED for (int plane = 0; plane < PLANES; plane++) {
                    const Floats field = numbers(loaded & ONES << BITS * plane);
                    const auto& own = scaled_query[(plane * ROWS + row) / KEY_GROUP];
                    UNROLLED for (int r = 0; r < QUERIES; r++) found[plane][r] += field * own[r][v];
                }
            }
            UNROLLED for (int plane = 0; plane < PLANES; plane++)
                UNROLLED for (int r = 0; r < QUERIES; r++) products[r * PAGE + plane * ROWS + row] = found[plane][r];
        }
        for (int r = 0; r < QUERIES; r++)
            for (int g = 0; g < KEY_GROUPS; g++) {
                const float base = total(zero[g][r]);
                for (int t = g * KEY_GROUP; t < (g + 1) * KEY_GROUP; t += LANES)
                    store(scores + r * PAGE + t, sums(products + r * PAGE + t) * load<Floats>(units.of + t) + base);
            }
    }

    void add_page(const uint8_t* page, const Scale* scales, const Scale* zeros) {
        constexpr int BITS = width_of(VALUE_BITS), PLANES = 8 / BITS, ROWS = PAGE / PLANES, ONES = (1 << BITS) - 1;
        static constexpr Units<BITS> units;
        uint8_t room[PAGE * HEAD];
        const uint8_t* codes = fields<VALUE_BITS>(page, room);
        float weights[GROUPS][QUERIES][PAGE], all_scales[PAGE * GROUPS], all_zeros[PAGE * GROUPS];
        for (int i = 0; i < PAGE * GROUPS; i += LANES) {
            store(all_scales + i, read(scales + i));
            store(all_zeros + i, read(zeros + i));
        }
        for (int g = 0; g < GROUPS; g++) {
            float scale[PAGE], zero_point[PAGE];
            for (int t = 0; t < PAGE; t++) scale[t] = all_scales[t * GROUPS + g] * units.of[t];
            for (int t = 0; t < PAGE; t++) zero_point[t] = all_zeros[t * GROUPS + g];
            for (int r = 0; r < QUERIES; r++) {
                Floats base = {};
                for (int t = 0; t < PAGE; t += LANES) {
                    const Floats weight = load<Floats>(scores + r * PAGE + t);
                    store(weights[g][r] + t, weight * load<Floats>(scale + t));
                    base += weight * load<Floats>(zero_point + t);
                }
                const float more = total(base);
                float* own = out + r * HEAD + g * VALUE_GROUP;
                for (int d = 0; d < VALUE_GROUP; d += LANES) store(own + d, load<Floats>(own + d) + more);
            }
        }
        for (int g = 0; g < GROUPS; g++)
            for (int d = g * VALUE_GROUP; d < (g + 1) * VALUE_GROUP; d += LANES) {
                Floats found[QUERIES];
                UNROLLED for (int r = 0; r < QUERIES; r++) found[r] = load<Floats>(out + r * HEAD + d);
                for (int row = 0; row < ROWS; row++) {
                    const Ints loaded = widened(codes + row * HEAD + d);
                    UNROLLED for (int plane = 0; plane < PLANES; plane++) {
                        const Floats field = numbers(loaded & ONES << BITS * plane);
                        const int t = plane * ROWS + row;
                        UNROLLED for (int r = 0; r < QUERIES; r++) found[r] += field * weights[g][r][t];
                    }
                }
                UNROLLED for (int r = 0; r < QUERIES; r++) store(out + r * HEAD + d, found[r]);
            }
    }
};

}  // namespace
