// The bytes of a head in a page that holds all heads (kvpass/codec/layer_pages.py). Needs allocated.h with SHARED.

namespace {

// The fields of a head: for each rank the coordinate, the shift and the column of pairs, then of single bits.
struct HeadFields {
    struct Field {
        int coordinate, shift;
    };
    std::vector<Field> pairs[LAST + 1], singles[LAST + 1];

    explicit HeadFields(const uint8_t* widths) {
        for_each_field(widths, [&](int, int coordinate, int kind, float zero, int rank) {
            (zero == PAIR ? pairs : singles)[rank].push_back({coordinate, kind % 8});
        });
    }
};

// Calls act(byte, bit, f) for token t of a rank and each of its count fields of BITS bits: the byte that has it, and its
// lowest bit there.
template <int BITS, typename Bytes, typename Do>
inline void for_each_stored(Bytes* page, int at, int row, int tokens, int t, int count, Do act) {
    const int rows = tokens * BITS / 8, bit = t / rows * BITS;
    Bytes* bytes = page + at + t % rows * row;
    for (int f = 0; f < count; f++) act(bytes[f], bit, f);
}

}  // namespace
