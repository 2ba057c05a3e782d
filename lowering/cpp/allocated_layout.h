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
constexpr float PAIR = 1.5f, SINGLE = 0.5f;  // the codes that represent 0

template <int BEGIN = 0, typename Do>
inline void for_each_rank(Do act) {
    act(std::integral_constant<int, BEGIN>());
    if constexpr (BEGIN < LAST) for_each_rank<BEGIN + 1>(act);
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

}  // namespace
