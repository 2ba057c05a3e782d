// Unpacks pages of codes (kvpass/codec/bitpack.py).
namespace {

// Bit width of the first field of a code.
constexpr int first_field(int bits) { return bits == 3 ? 2 : bits == 6 ? 4 : bits; }

// Adds fields of WIDTH bits to codes, at bit SHIFT.
template <int WIDTH, int SHIFT, int COLUMNS>
inline void add_field(const uint8_t* bytes, uint8_t* codes) {
    constexpr int PLANES = 8 / WIDTH, COUNT = PAGE / PLANES * COLUMNS, ONES = (1 << WIDTH) - 1;
    UNROLLED for (int plane = 0; plane < PLANES; plane++)
        for (int i = 0; i < COUNT; i++) {
            const uint8_t field = (bytes[i] >> plane * WIDTH & ONES) << SHIFT;
            codes[plane * COUNT + i] = SHIFT ? codes[plane * COUNT + i] | field : field;
        }
}

// The codes of a page, of CODE bits, as bytes [PAGE, COLUMNS]: the page itself or, where bytes have several, room.
template <int CODE, int COLUMNS>
inline const uint8_t* unpack(const uint8_t* page, uint8_t* room) {
    constexpr int FIRST = first_field(CODE);
    if constexpr (CODE == 8) return page;
    add_field<FIRST, 0, COLUMNS>(page, room);
    if constexpr (FIRST < CODE) add_field<CODE - FIRST, FIRST, COLUMNS>(page + PAGE * FIRST / 8 * COLUMNS, room);
    return room;
}

}  // namespace
