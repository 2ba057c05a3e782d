// Pages of keys and values with per-token scales: uniform codes, and codes that stand for points of a grid
// (kvpass/codec/codebook.py), rotated or not. Needs tokens.h and unpack.h.
//
// Macros, for keys and values (KEY_..., VALUE_...): BITS: bit width of a code. DIM: channels that a code stands for.
// POINTS: of the grid; 0 for uniform codes, which have zero points. GROUP: channels that share a scale.
namespace {

template <int POINTS>
struct Table {
    static constexpr int COUNT = padded(POINTS) / LANES;
    static_assert((COUNT & (COUNT - 1)) == 0, "vectors are selected by the bits of a code");
    Floats of[COUNT > 0 ? COUNT : 1];
    const float* points;

    explicit Table(const float* from) : of(), points(from) {
        float whole[padded(POINTS) + 1] = {};
        for (int i = 0; i < POINTS; i++) whole[i] = from[i];
        for (int i = 0; i < COUNT; i++) of[i] = load<Floats>(whole + i * LANES);
    }

    // The points of LANES codes; for uniform codes, the codes as numbers.
    Floats operator()(Ints index) const {
        if constexpr (POINTS == 0) return numbers(index);
        else return look_up(index);
    }

private:
#if LANES == 16
    Floats look_up(Ints index) const { return among<0, COUNT>(index); }
#elif LANES == 8
    Floats look_up(Ints index) const {
        if constexpr (COUNT > 4) return (Floats)_mm256_i32gather_ps(points, (__m256i)index, 4);
        else return among<0, COUNT>(index);
    }
#else
    Floats look_up(Ints index) const {
        Floats found;
        for (int i = 0; i < LANES; i++) found[i] = points[index[i]];
        return found;
    }
#endif

#if LANES >= 8
    // Looks up in NUMBER vectors, from FIRST on.
    template <int FIRST, int NUMBER>
    Floats among(Ints index) const {
        if constexpr (NUMBER > LANES / 8) {
            const Floats low = among<FIRST, NUMBER / 2>(index), high = among<FIRST + NUMBER / 2, NUMBER / 2>(index);
            return (index & NUMBER / 2 * LANES) != 0 ? high : low;
        }
#if LANES == 8
        else return (Floats)_mm256_permutevar8x32_ps((__m256)of[FIRST], (__m256i)index);
#else
        else if constexpr (NUMBER == 2)
            return (Floats)_mm512_permutex2var_ps((__m512)of[FIRST], (__m512i)index, (__m512)of[FIRST + 1]);
        else return (Floats)_mm512_permutexvar_ps((__m512i)index, (__m512)of[FIRST]);
#endif
    }
#endif
};

template <int BITS, int DIM, int POINTS, int GROUP>
struct Side {
    static constexpr int COLUMNS = HEAD / DIM, GROUPS = HEAD / GROUP, COLUMNS_OF_GROUP = GROUP / DIM;
    static constexpr int64_t CODES = PAGE * BITS / 8 * COLUMNS, PARAMS = PAGE * GROUPS * sizeof(Scale);
    static constexpr int64_t ZEROS = POINTS ? 0 : PARAMS;

    // Parameters of a page, [PAGE, GROUPS], as [GROUPS, PAGE].
    static void by_group(const Scale* from, float (*to)[PAGE]) {
        float all[PAGE * GROUPS];
        for (int i = 0; i < PAGE * GROUPS; i += LANES) store(all + i, read(from + i));
        for (int g = 0; g < GROUPS; g++)
            for (int t = 0; t < PAGE; t++) to[g][t] = all[t * GROUPS + g];
    }
};

struct Codes : RunningSoftmax {
    using Keys = Side<KEY_BITS, KEY_DIM, KEY_POINTS, KEY_GROUP>;
    using Values = Side<VALUE_BITS, VALUE_DIM, VALUE_POINTS, VALUE_GROUP>;
    static constexpr int64_t BYTES[6] = {
        Keys::CODES, Keys::PARAMS, Keys::ZEROS, Values::CODES, Values::PARAMS, Values::ZEROS};

    float scores[QUERIES * PAGE], turned[QUERIES * HEAD] = {}, shift[QUERIES] = {};  // as in Reading (attend_parts.h)
    float sums_of_groups[Keys::GROUPS][QUERIES] = {};  // of turned
    const float *key_points, *value_points;

    using RunningSoftmax::RunningSoftmax;

    // first: the first of count queries, among those of the head.
    template <typename Context>
    void begin(const Context& context, int64_t first, int64_t count) {
        const auto& reading = context.reading;
        key_points = reading.key_points, value_points = reading.value_points;
        std::copy_n(reading.turned.data() + (context.row + first) * HEAD, count * HEAD, turned);
        std::copy_n(reading.shifts.data() + context.row + first, count, shift);
        for (int r = 0; r < QUERIES; r++)
            for (int i = 0; i < HEAD; i++)
                sums_of_groups[i % Keys::COLUMNS / Keys::COLUMNS_OF_GROUP][r] += turned[r * HEAD + i];
    }

    void score_page(const uint8_t* page, const Scale* scales, const Scale* zeros) {
        uint8_t room[PAGE * Keys::COLUMNS];
        float scale[Keys::GROUPS][PAGE];
        Keys::by_group(scales, scale);
        score_codes(unpack<KEY_BITS, Keys::COLUMNS>(page, room), scale, std::make_index_sequence<KEY_DIM>());
        for (int r = 0; r < QUERIES; r++)
            for (int t = 0; t < PAGE; t += LANES) {
                Floats found = sums(products + r * PAGE + t);
                if constexpr (Keys::GROUPS == 1) found *= load<Floats>(scale[0] + t);
                store(scores + r * PAGE + t, found + shift[r]);
            }
        if constexpr (Keys::ZEROS > 0) {
            Keys::by_group(zeros, scale);
            for (int g = 0; g < Keys::GROUPS; g++)
                for (int r = 0; r < QUERIES; r++)
                    for (int t = 0; t < PAGE; t += LANES) {
                        float* own = scores + r * PAGE + t;
                        store(own, load<Floats>(own) + load<Floats>(scale[g] + t) * sums_of_groups[g][r]);
                    }
        }
    }

    template <size_t... PLACE>
    void score_codes(const uint8_t* codes, const float (*scale)[PAGE], std::index_sequence<PLACE...>) {
        const Table<KEY_POINTS> tables[] = {Table<KEY_POINTS>(key_points + PLACE * KEY_POINTS)...};
        for (int t = 0; t < PAGE; t++) {
            Floats found[QUERIES] = {};
            UNROLLED for (int g = 0; g < Keys::GROUPS; g++) {
                Floats own[QUERIES] = {};
                UNROLLED for (int c = 0; c < Keys::COLUMNS_OF_GROUP; c += LANES) {
                    const int column = g * Keys::COLUMNS_OF_GROUP + c;
                    const Ints index = widened(codes + t * Keys::COLUMNS + column);
                    UNROLLED for (int k = 0; k < KEY_DIM; k++) {
                        const Floats x = tables[k](index);
                        UNROLLED for (int r = 0; r < QUERIES; r++)
                            own[r] += x * load<Floats>(turned + r * HEAD + k * Keys::COLUMNS + column);
                    }
                }
                UNROLLED for (int r = 0; r < QUERIES; r++)
                    found[r] += Keys::GROUPS == 1 ? own[r] : own[r] * scale[g][t];
            }
            UNROLLED for (int r = 0; r < QUERIES; r++) products[r * PAGE + t] = found[r];
        }
    }

    void add_page(const uint8_t* page, const Scale* scales, const Scale* zeros) {
        uint8_t room[PAGE * Values::COLUMNS];
        const uint8_t* codes = unpack<VALUE_BITS, Values::COLUMNS>(page, room);
        float scale[Values::GROUPS][PAGE], weights[Values::GROUPS][QUERIES][PAGE];
        Values::by_group(scales, scale);
        for (int g = 0; g < Values::GROUPS; g++)
            for (int r = 0; r < QUERIES; r++)
                for (int t = 0; t < PAGE; t += LANES)
                    store(weights[g][r] + t, load<Floats>(scores + r * PAGE + t) * load<Floats>(scale[g] + t));
        if constexpr (Values::ZEROS > 0) {
            Values::by_group(zeros, scale);
            for (int g = 0; g < Values::GROUPS; g++)
                for (int r = 0; r < QUERIES; r++) {
                    const float more = dot(scores + r * PAGE, scale[g], PAGE);
                    float* own = out + r * HEAD + g * VALUE_GROUP;  // of uniform codes, code order is that of channels
                    for (int d = 0; d < VALUE_GROUP; d += LANES) store(own + d, load<Floats>(own + d) + more);
                }
        }
        add_codes<0>(codes, weights);
    }

    // Adds the weighted points of all codes, at two places of a code at a time.
    template <int PLACE>
    void add_codes(const uint8_t* codes, const float (*weights)[QUERIES][PAGE]) {
        constexpr int PLACES = VALUE_DIM - PLACE > 1 ? 2 : 1;
        const Table<VALUE_POINTS> tables[2] = {
            Table<VALUE_POINTS>(value_points + PLACE * VALUE_POINTS),
            Table<VALUE_POINTS>(value_points + (PLACE + PLACES - 1) * VALUE_POINTS)};
        for (int column = 0; column < Values::COLUMNS; column += LANES) {
            float* own = out + PLACE * Values::COLUMNS + column;
            const auto& weight = weights[column / Values::COLUMNS_OF_GROUP];
            Floats found[QUERIES][PLACES];
            UNROLLED for (int r = 0; r < QUERIES; r++)
                UNROLLED for (int k = 0; k < PLACES; k++)
                    found[r][k] = load<Floats>(own + r * HEAD + k * Values::COLUMNS);
            for (int t = 0; t < PAGE; t++) {
                const Ints index = widened(codes + t * Values::COLUMNS + column);
                UNROLLED for (int k = 0; k < PLACES; k++) {
                    const Floats x = tables[k](index);
                    UNROLLED for (int r = 0; r < QUERIES; r++) found[r][k] += x * weight[r][t];
                }
            }
            UNROLLED for (int r = 0; r < QUERIES; r++)
                UNROLLED for (int k = 0; k < PLACES; k++)
                    store(own + r * HEAD + k * Values::COLUMNS, found[r][k]);
        }
        if constexpr (PLACE + PLACES < VALUE_DIM) add_codes<PLACE + PLACES>(codes, weights);
    }
};

}  // namespace
