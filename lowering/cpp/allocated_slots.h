// The slots of the tokens of a page: its high-precision tokens come first. Needs allocated_layout.h.

namespace {

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

}  // namespace
