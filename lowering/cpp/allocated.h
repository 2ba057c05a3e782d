// Pages with per-channel bit widths: their bytes, the gains of their tokens, and what a field adds to a coordinate. Needs
// allocated_layout.h.

namespace {

constexpr int QUERIES_AT_ONCE = QUERIES < 4 ? QUERIES : 4;  // queries per unpacking of a field
constexpr int GAINS = 256;  // entries of the table; the weights of the kinds of fields follow

// What a field adds to its coordinate: the weight of its kind times its code, relative to the code that represents 0.
struct Field {
#if LANES >= 8
    float by_code[4];

    Field(float weight = 0, float zero = 0) {
        for (int code = 0; code < 4; code++) by_code[code] = weight * ((zero == SINGLE ? code % 2 : code) - zero);
    }

    // The value of the code in the lowest BITS (1 or 2) bits of each lane: a look-up by the lowest two.
    template <int BITS>
    Floats of(Ints x) const {
        const __m128 values = load<__m128>(by_code);
#if LANES == 16
        return (Floats)_mm512_permutevar_ps(_mm512_broadcast_f32x4(values), (__m512i)x);
#else
        return (Floats)_mm256_permutevar_ps(_mm256_broadcast_ps(&values), (__m256i)x);
#endif
    }
#else
    float weight, zero;

    Field(float weight = 0, float zero = 0) : weight(weight), zero(zero) {}

    template <int BITS>
    Floats of(Ints x) const {
        return (numbers(x & (1 << BITS) - 1) - zero) * weight;
    }
#endif
};

// Lane i is from[at[i]]. SIZE: number of values in from.
template <int SIZE>
inline Floats permuted(const float* from, Ints at) {
#if LANES == 16
    if constexpr (SIZE == 16) return (Floats)_mm512_permutexvar_ps((__m512i)at, load<__m512>(from));
    if constexpr (SIZE == 32)
        return (Floats)_mm512_permutex2var_ps(load<__m512>(from), (__m512i)at, load<__m512>(from + 16));
#endif
#if LANES == 8
    if constexpr (SIZE == 16 || SIZE == 32) {  // the bits of an index choose a lane, then a vector
        const __m256i index = (__m256i)at;
        const auto of_two = [&](int first) {
            const __m256 low = _mm256_permutevar8x32_ps(load<__m256>(from + first), index);
            const __m256 high = _mm256_permutevar8x32_ps(load<__m256>(from + first + 8), index);
            return _mm256_blendv_ps(low, high, (__m256)_mm256_slli_epi32(index, 28));
        };
        if constexpr (SIZE == 16) return (Floats)of_two(0);
        else return (Floats)_mm256_blendv_ps(of_two(0), of_two(16), (__m256)_mm256_slli_epi32(index, 27));
    }
#endif
    Floats found = {};
    for (int i = 0; i < LANES; i++) found[i] = from[at[i]];
    return found;
}

constexpr int CACHE_LINE = 64;  // bytes

inline void prefetch(const uint8_t* bytes, int64_t size) {
    for (int64_t at = 0; at < size; at += CACHE_LINE) __builtin_prefetch(bytes + at);
}

// A page after which LANES more bytes can be read. The last page of a pool is copied; where else pages are, pages(page)
// returns one, with as many bytes after it. The page two pages on is prefetched, because caches of a batch do not stay in
// the processor's caches from step to step.
struct Page {
    const uint8_t* bytes;
#if SHARED
    std::vector<uint8_t> copy;

    template <typename Pages>
    Page(const Pages& pages, const Layout&, int64_t page, int64_t) : bytes(pages(page)) {}

    Page(const uint8_t* pages, const Layout& layout, int64_t page, int64_t room) : bytes(pages + page * layout.bytes) {
        if (page + 2 < room) prefetch(bytes + 2 * layout.bytes, layout.bytes);
        if (page + 1 < room) return;
        copy.resize(layout.bytes + LANES);
        std::copy(bytes, bytes + layout.bytes, copy.begin());
        bytes = copy.data();
    }
#else
    uint8_t copy[PAGE_BYTES + LANES];

    Page(const uint8_t* pages, const Layout&, int64_t page, int64_t room) : bytes(pages + page * PAGE_BYTES) {
        if (page + 2 < room) prefetch(bytes + 2 * PAGE_BYTES, PAGE_BYTES);
        if (page + 1 < room) return;
        std::memcpy(copy, bytes, PAGE_BYTES);
        bytes = copy;
    }
#endif
};

#if LANES >= 8
// For columns of matrices with up to 8 columns: the bytes of each 16 bytes that are in 16 rows of a column.
struct ColumnBytes {
    static constexpr int WIDEST = 8;
    uint8_t at[WIDEST + 1][WIDEST][16];

    constexpr ColumnBytes() : at{} {
        for (int columns = 1; columns <= WIDEST; columns++)
            for (int v = 0; v < columns; v++)
                for (int row = 0; row < 16; row++) {
                    const int byte = row * columns - v * 16;
                    at[columns][v][row] = byte >= 0 && byte < 16 ? byte : 255;
                }
    }
};
constexpr ColumnBytes COLUMN_BYTES;

// 16 rows of a column of bytes. columns: bytes per row, at most ColumnBytes::WIDEST. Up to columns - 1 bytes after the
// last one are read.
inline __m128i column_of_bytes(const uint8_t* from, int columns) {
    __m128i found = {};
    for (int v = 0; v < columns; v++)
        found = _mm_or_si128(
            found, _mm_shuffle_epi8(load<__m128i>(from + 16 * v), load<__m128i>(COLUMN_BYTES.at[columns][v])));
    return found;
}

// The gains of levels: those of the first octave, times a power of 2.
inline Floats gains_of(const uint8_t* levels, const float* table) {
    constexpr int OCTAVE = 16, EXPONENT = 23;  // levels per factor of 2 (transform_coding.py); bits of a mantissa
    const Ints level = widened(levels);
    return (Floats)((Ints)permuted<OCTAVE>(table, level & OCTAVE - 1) + (level / OCTAVE << EXPONENT));
}
#endif

// Finds the gain of the token in each slot of a page.
inline void find_gains(const uint8_t* page, const Layout& layout, const float* table, float* gains) {
    for_each_rank([&](auto rank) {
        constexpr int tokens = RANKS[rank.value].tokens;
        const Place& own = layout[rank.value];
        if (SHARED && !own.pairs && !own.singles) return;  // gains are not used
        const uint8_t* levels = page + own.gains_at;
        float* found = gains + first_token(rank);
#if LANES >= 8
        if (tokens % 16 == 0 && own.gains_row <= ColumnBytes::WIDEST) {
            for (int t = 0; t < tokens; t += 16) {
                uint8_t column[16];
                const __m128i loaded = column_of_bytes(levels + t * own.gains_row, own.gains_row);
                std::memcpy(column, &loaded, sizeof(column));
                for (int i = 0; i < 16; i += LANES) store(found + t + i, gains_of(column + i, table));
            }
            return;
        }
#endif
        for (int t = 0; t < tokens; t++) found[t] = table[levels[t * own.gains_row]];
    });
}

// Calls act(count, first) for runs of count queries.
template <typename Do>
inline void for_each_run_of_queries(Do act) {
    int r = 0;
    for (; r + QUERIES_AT_ONCE <= QUERIES; r += QUERIES_AT_ONCE) act(std::integral_constant<int, QUERIES_AT_ONCE>(), r);
    if constexpr (QUERIES % QUERIES_AT_ONCE > 0) act(std::integral_constant<int, QUERIES % QUERIES_AT_ONCE>(), r);
}

// Number of parts into which the pages of a head are divided, so that threads can share them.
inline int64_t parts_of(int64_t pages, int64_t threads) {
    return threads > 1 ? std::max<int64_t>(1, std::min(pages / 4, 4 * threads)) : 1;
}

}  // namespace
