// Layout of pages with per-channel bit widths (kvpass/codec/allocation.py), for vectorized loops. Needs vectors.h.
//
// Macros (allocated.py): QUERIES query heads per KV head, HEAD channels in blocks of BLOCK, PAGE tokens per page,
// PAGE_BYTES bytes per page, NUM_FIELDS fields per head. RANKED: half of the tokens, the high-precision ones, have more
// bits. HIGH_PAIRS, HIGH_SINGLES, LOW_PAIRS, LOW_SINGLES: fields per token of the high-precision and of the
// low-precision rank; pages without ranks use LOW. Fields of a kind are read LANES at a time: arrays of fields are
// padded, and fields read beyond the last one are ignored.
//
// SHARED: bit widths are calibrated (kvpass/codec/shares.py). A page then holds all heads, PAGE_BYTES is 0, and the
// numbers of fields are upper bounds. The share of the layer gives the actual numbers and positions at run time.

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
#else
struct Layout {
    static constexpr int mask_at = 0, mask_row = 1, bytes = PAGE_BYTES;

    constexpr Place operator[](int rank) const {
        const Rank& own = RANKS[rank];
        return {own.first_byte, own.pairs, own.pairs, own.singles_byte(), own.singles, own.singles, own.gains_byte(), 1};
    }
};
#endif
constexpr int first_token(int rank) { return rank ? RANKS[0].tokens : 0; }
constexpr int QUERIES_AT_ONCE = QUERIES < 4 ? QUERIES : 4;  // queries per unpacking of a field
constexpr float PAIR = 1.5f, SINGLE = 0.5f;  // the codes that represent 0
constexpr int GAINS = 256;  // entries of the table; the weights of the kinds of fields follow

// The value of the lowest BITS (1 or 2) bits of each lane.
template <int BITS>
inline Floats centered(Ints x) {
    constexpr int ONES = (1 << BITS) - 1;
    constexpr float ZERO = BITS == 2 ? PAIR : SINGLE;
#if LANES >= 8  // look-up by the lowest two bits
    constexpr float third = (2 & ONES) - ZERO, last = ONES - ZERO;
#if LANES == 16
    return (Floats)_mm512_permutevar_ps(_mm512_set4_ps(last, third, 1 - ZERO, -ZERO), (__m512i)x);
#else
    const __m256 numbers = _mm256_setr_ps(-ZERO, 1 - ZERO, third, last, -ZERO, 1 - ZERO, third, last);
    return (Floats)_mm256_permutevar_ps(numbers, (__m256i)x);
#endif
#else
    return numbers(x & ONES) - ZERO;
#endif
}

// Lane i is from[at[i]]. SIZE: number of values in from.
template <int SIZE>
inline Floats permuted(const float* from, const int32_t* at) {
#if LANES == 16
    if constexpr (SIZE == 16) return (Floats)_mm512_permutexvar_ps(load<__m512i>(at), load<__m512>(from));
    if constexpr (SIZE == 32)
        return (Floats)_mm512_permutex2var_ps(load<__m512>(from), load<__m512i>(at), load<__m512>(from + 16));
#endif
    Floats found = {};
    for (int i = 0; i < LANES; i++) found[i] = from[at[i]];
    return found;
}

#undef BY_MASKS
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

// A page after which LANES more bytes can be read. The last page of a pool is copied; where else pages are, pages(page)
// returns one, with as many bytes after it.
struct Page {
    const uint8_t* bytes;
#if SHARED
    std::vector<uint8_t> copy;

    template <typename Pages>
    Page(const Pages& pages, const Layout&, int64_t page, int64_t) : bytes(pages(page)) {}

    Page(const uint8_t* pages, const Layout& layout, int64_t page, int64_t room) : bytes(pages + page * layout.bytes) {
        if (page + 1 < room) return;
        copy.resize(layout.bytes + LANES);
        std::copy(bytes, bytes + layout.bytes, copy.begin());
        bytes = copy.data();
    }
#else
    uint8_t copy[PAGE_BYTES + LANES];

    Page(const uint8_t* pages, const Layout&, int64_t page, int64_t room) : bytes(pages + page * PAGE_BYTES) {
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

// Finds the gain of the token in each slot of a page.
inline void find_gains(const uint8_t* page, const Layout& layout, const float* table, float* gains) {
    for_each_rank([&](auto rank) {
        constexpr int tokens = RANKS[rank.value].tokens;
        const Place& own = layout[rank.value];
        if (SHARED && !own.pairs && !own.singles) return;  // gains are not used
        for (int t = 0; t < tokens; t++)
            gains[first_token(rank) + t] = table[page[own.gains_at + t * own.gains_row]];
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
