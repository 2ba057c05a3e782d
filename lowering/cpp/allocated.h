// Layout of pages with per-channel bit widths (kvpass/codec/allocation.py), for vectorized loops. Needs vectors.h.
//
// Macros (allocated.py): QUERIES query heads per KV head, HEAD channels in blocks of BLOCK, PAGE tokens per page,
// PAGE_BYTES bytes per page, NUM_FIELDS fields per head. RANKED: half of the tokens, the high-precision ones, have more
// bits. HIGH_PAIRS, HIGH_SINGLES, LOW_PAIRS, LOW_SINGLES: fields per token of the high-precision and of the
// low-precision rank; pages without ranks use LOW. Fields of a kind are read LANES at a time: arrays of fields are
// padded, and fields read beyond the last one are ignored.
//
// SHARED: a page holds all heads (kvpass/codec/layer_pages.py), PAGE_BYTES is 0, and the numbers of fields are upper
// bounds. The share of the layer gives the actual numbers and positions at run time.

namespace {

// The tokens of one rank: their number, their fields, and the start of the fields in a page and in padded arrays.
struct Rank {
    int tokens, pairs, singles, first_byte, first_field;

    constexpr int quarter() const { return tokens / 4; }
    constexpr int eighth() const { return tokens / 8; }
    constexpr int of_singles() const { return first_field + padded(pairs); }
    constexpr int end_field() const { return of_singles() + padded(singles); }
    constexpr int singles_byte() const { return first_byte + quarter() * pairs; }
    constexpr int gains_byte() const { return singles_byte() + eighth() * singles; }
};

#if RANKED
constexpr Rank HIGH = {PAGE / 2, HIGH_PAIRS, HIGH_SINGLES, PAGE / 8, 0};
constexpr Rank RANKS[] = {
    HIGH, {PAGE - PAGE / 2, LOW_PAIRS, LOW_SINGLES, HIGH.gains_byte() + HIGH.tokens, HIGH.end_field()}};
#else
constexpr Rank RANKS[] = {{PAGE, LOW_PAIRS, LOW_SINGLES, 0, 0}};
#endif
constexpr int LAST = sizeof(RANKS) / sizeof(Rank) - 1, FIELDS = RANKS[LAST].end_field();
constexpr int64_t BYTES_OF_PAGE = PAGE_BYTES, PLACES_OF_HEAD = NUM_FIELDS;

// Position of a head's data of one rank in a page: for pairs, single bits and gains the first byte and the bytes per
// row, and the numbers of pairs and of single bits.
struct Place {
    int pairs_at, pairs_row, pairs, singles_at, singles_row, singles, gains_at, gains_row;
};

#if SHARED
// share: [ranks, 3, heads + 1], the start columns of each head's pairs, single bits and gains.
struct Layout {
    Place ranks[LAST + 1];
    int mask_at, mask_row, bytes;

    Layout(const int32_t* share, int heads, int head) : mask_at(head), mask_row(heads) {
        int at = LAST ? PAGE / 8 * heads : 0;
        for (int rank = 0; rank <= LAST; rank++) {
            const int32_t *pairs = share + rank * 3 * (heads + 1), *singles = pairs + heads + 1;
            const int32_t* gains = singles + heads + 1;
            Place& own = ranks[rank];
            own.pairs_at = at + pairs[head], own.pairs_row = pairs[heads], own.pairs = pairs[head + 1] - pairs[head];
            at += RANKS[rank].quarter() * pairs[heads];
            own.singles_at = at + singles[head], own.singles_row = singles[heads];
            own.singles = singles[head + 1] - singles[head];
            at += RANKS[rank].eighth() * singles[heads];
            own.gains_at = at + gains[head], own.gains_row = gains[heads];
            at += RANKS[rank].tokens * gains[heads];
        }
        bytes = at;
    }

    const Place& operator[](int rank) const { return ranks[rank]; }
};

// The layouts of the heads of samples, from the bit widths of their coordinates [samples, heads, ranks, HEAD].
struct Layouts {
    int heads, size;
    std::vector<int32_t> shares;

    Layouts(const uint8_t* widths, int64_t samples, int64_t heads)
        : heads(heads), size(3 * (LAST + 1) * (heads + 1)), shares(samples * size) {
        for (int64_t i = 0; i < samples * heads * (LAST + 1); i++, widths += HEAD) {
            const int rank = i % (LAST + 1), head = i / (LAST + 1) % heads;
            int pairs = 0, singles = 0;
            for (int c = 0; c < HEAD; c++) pairs += widths[c] / 2, singles += widths[c] % 2;
            int32_t* to = shares.data() + i / (LAST + 1) / heads * size + rank * 3 * (heads + 1) + head;
            to[1] = to[0] + pairs, to += heads + 1;
            to[1] = to[0] + singles, to += heads + 1;
            to[1] = to[0] + (pairs + singles > 0);
        }
    }

    Layout of(int64_t sample, int head) const { return {shares.data() + sample * size, heads, head}; }
};
#else
struct Layout {
    static constexpr int mask_at = 0, mask_row = 1, bytes = PAGE_BYTES;

    constexpr Place operator[](int rank) const {
        const Rank& own = RANKS[rank];
        return {own.first_byte, own.pairs, own.pairs, own.singles_byte(), own.singles, own.singles, own.gains_byte(), 1};
    }
};

// All heads have the same layout.
struct Layouts {
    Layouts(const int32_t*, int64_t, int64_t) {}

    Layout of(int64_t, int) const { return {}; }
};
#endif
constexpr int first_token(int rank) { return rank ? RANKS[0].tokens : 0; }
constexpr int QUERIES_AT_ONCE = QUERIES < 4 ? QUERIES : 4;  // queries per unpacking of a field
constexpr float PAIR = 1.5f, SINGLE = 0.5f;  // the codes that represent 0
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

#undef BY_MASKS
#undef BY_FLAGS
#if RANKED && LANES == 16 && defined(__BMI2__) && PAGE % 16 == 0 && PAGE <= 64
#define BY_MASKS 1

// Bit mask of the high-precision tokens of a page; bit t is token t.
inline uint64_t high_precision_mask(const uint8_t* page, const Layout& layout) {
    constexpr int ROWS = PAGE / 8;
    uint64_t found = 0, each = 0;
    for (int bit = 0; bit < 8; bit++) each |= uint64_t(1) << bit * ROWS;
    for (int row = 0; row < ROWS; row++)
        found |= _pdep_u64(page[layout.mask_at + row * layout.mask_row], each << row);
    return found;
}

// Calls act(t, mask, high) for each LANES tokens from t on. mask: the high-precision ones among them. high: the number
// of high-precision tokens before t.
template <typename Do>
inline void for_each_mask(const uint8_t* page, const Layout& layout, Do act) {
    const uint64_t tokens = high_precision_mask(page, layout);
    int high = 0;
    for (int t = 0; t < PAGE; t += LANES) {
        const __mmask16 mask = tokens >> t;
        act(t, mask, high);
        high += __builtin_popcount(mask);
    }
}
#else
#define BY_MASKS 0
#endif

#if RANKED && (PAGE == 32 || PAGE == 64)
#define BY_FLAGS 1

// Calls act(t, flags, high) for each 8 tokens from t on. flags: a byte per token, 1 if it is a high-precision one. high:
// the number of high-precision tokens before t.
template <typename Do>
inline void for_each_flags(const uint8_t* page, const Layout& layout, Do act) {
    constexpr int ROWS = PAGE / 8;  // bit b of row r is token b * ROWS + r
    constexpr uint64_t ONES = ~uint64_t(0) / 255;
    uint64_t rows = 0, high = 0;
    for (int row = 0; row < ROWS; row++)
        rows |= uint64_t(page[layout.mask_at + row * layout.mask_row]) << 8 * row;
    if (ROWS == 4) rows |= rows >> 1 << 32;
    for (int t = 0; t < PAGE; t += 8) {
        const uint64_t flags = rows >> t / ROWS & ONES;
        act(t, flags, high);
        high += flags * ONES >> 56;
    }
}
#else
#define BY_FLAGS 0
#endif

inline Ints counting_from(int first) {
    Ints found;
    for (int i = 0; i < LANES; i++) found[i] = first + i;
    return found;
}

// Finds the slot of each token of a page. Unwritten pages, without high-precision tokens, give arbitrary slots below
// PAGE.
inline void find_slots(const uint8_t* page, const Layout& layout, int32_t* slots) {
#if BY_MASKS
    for_each_mask(page, layout, [&](int t, __mmask16 mask, int high) {
        const __m512i low = _mm512_min_epi32(
            (__m512i)counting_from(first_token(LAST) + t - high), _mm512_set1_epi32(PAGE - 1));
        const __m512i found = _mm512_or_si512(
            _mm512_maskz_expand_epi32(mask, (__m512i)counting_from(high)), _mm512_maskz_expand_epi32(~mask, low));
        std::memcpy(slots + t, &found, sizeof(found));
    });
#elif BY_FLAGS
    uint8_t found[PAGE];
    for_each_flags(page, layout, [&](int t, uint64_t flags, uint64_t high) {  // computes 8 bytes at a time
        constexpr uint64_t ONES = ~uint64_t(0) / 255, COUNTING = 0x0706050403020100;
        const uint64_t before = flags * ONES << 8, is_high = flags * 255;
        const uint64_t low = COUNTING - before + (first_token(LAST) + t - high) * ONES;
        const uint64_t own = low ^ ((low ^ (before + high * ONES)) & is_high);
        std::memcpy(found + t, &own, sizeof(own));
    });
    for (int t = 0; t < PAGE; t += LANES) {
        Ints own = widened(found + t);
        own = own < PAGE ? own : Ints{} + PAGE - 1;
        std::memcpy(slots + t, &own, sizeof(own));
    }
#elif RANKED
    int high = 0;
    for (int t = 0; t < PAGE; t++) {
        const uint8_t byte = page[layout.mask_at + t % (PAGE / 8) * layout.mask_row];
        const int is_high = byte >> t / (PAGE / 8) & 1;  // no branch: it would be unpredictable
        const int low = std::min(first_token(LAST) + t - high, PAGE - 1);
        slots[t] = low ^ ((low ^ high) & -is_high);
        high += is_high;
    }
#else
    for (int t = 0; t < PAGE; t++) slots[t] = t;
#endif
}

// Finds the token in each slot of a page. order has room for LANES more.
inline void find_order(const uint8_t* page, const Layout& layout, int32_t* order) {
#if BY_MASKS
    for_each_mask(page, layout, [&](int t, __mmask16 mask, int high) {
        const __m512i found = _mm512_maskz_compress_epi32(mask, (__m512i)counting_from(t));
        std::memcpy(order + high, &found, sizeof(found));
    });
    for_each_mask(page, layout, [&](int t, __mmask16 mask, int high) {  // overwrites the first pass's excess
        const __m512i found = _mm512_maskz_compress_epi32(~mask, (__m512i)counting_from(t));
        std::memcpy(order + std::min(first_token(LAST) + t - high, PAGE), &found, sizeof(found));
    });
#else
    int32_t slots[PAGE];
    find_slots(page, layout, slots);
    for (int t = 0; t < PAGE; t++) order[slots[t]] = t;
#endif
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

template <int BEGIN = 0, typename Do>
inline void for_each_rank(Do act) {
    act(std::integral_constant<int, BEGIN>());
    if constexpr (BEGIN < LAST) for_each_rank<BEGIN + 1>(act);
}

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

// for_each_field calls act(field, coordinate, kind, zero, rank) for each field of a head. field: its index in padded
// arrays; kind: index of its weight; zero: the code that represents 0.
#if SHARED
typedef uint8_t Fields;  // bit widths of coordinates, [ranks, HEAD]

template <typename Do>
inline void for_each_field(const uint8_t* widths, Do act) {
    for (int rank = 0; rank <= LAST; rank++, widths += HEAD) {
        int at = RANKS[rank].first_field;
        for (int shift = 0; shift < 6; shift += 2)
            for (int c = 0; c < HEAD; c++)
                if (widths[c] / 2 * 2 > shift) act(at++, c, widths[c] * 8 + shift, PAIR, rank);
        at = RANKS[rank].of_singles();
        for (int c = 0; c < HEAD; c++)
            if (widths[c] % 2) act(at++, c, widths[c] * 8 + widths[c] - 1, SINGLE, rank);
    }
}
#else
typedef int32_t Fields;  // places of fields: kind * HEAD + coordinate

template <typename Do>
inline void for_each_field(const int32_t* places, Do act) {
    for (int rank = 0; rank <= LAST; rank++) {
        const Rank& own = RANKS[rank];
        for (int f = 0; f < own.pairs; f++, places++) act(own.first_field + f, *places % HEAD, *places / HEAD, PAIR, rank);
        for (int f = 0; f < own.singles; f++, places++)
            act(own.of_singles() + f, *places % HEAD, *places / HEAD, SINGLE, rank);
    }
}
#endif

// Number of parts into which the pages of a head are divided, so that threads can share them.
inline int64_t parts_of(int64_t pages, int64_t threads) {
    return threads > 1 ? std::max<int64_t>(1, std::min(pages / 4, 4 * threads)) : 1;
}

}  // namespace
