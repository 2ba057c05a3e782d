// Quantizes coordinates of tokens to pages with per-channel bit widths (kvpass/codec/allocation.py,
// kvpass/codec/layer_pages.py). Needs allocated.h.
namespace {

// The bit widths and the fields of a head: for each rank the coordinate and the shift of pairs, then of single bits.
struct FieldsByRank {
    struct Field {
        int coordinate, shift;
    };
    std::vector<Field> pairs[LAST + 1], singles[LAST + 1];
    int widths[LAST + 1][HEAD] = {};

    explicit FieldsByRank(const Fields* fields) {
        for_each_field(fields, [&](int, int coordinate, int kind, float zero, int rank) {
            (zero == PAIR ? pairs : singles)[rank].push_back({coordinate, kind % 8});
            widths[rank][coordinate] = kind / 8;
        });
    }
};

// Calls act(byte, bit, f) for token t of a rank and each of its count fields of BITS bits: the byte that has it, and its
// lowest bit there.
template <int BITS, typename Do>
inline void for_each_stored(uint8_t* page, int at, int row, int tokens, int t, int count, Do act) {
    const int rows = tokens * BITS / 8, bit = t / rows * BITS;
    uint8_t* bytes = page + at + t % rows * row;
    for (int f = 0; f < count; f++) act(bytes[f], bit, f);
}

struct Coordinates {
    float step[HEAD], reciprocal[HEAD], most[HEAD], worth[HEAD], used[HEAD];
    float count = 0;

    Coordinates(const int* widths, const float* steps, const float* distortion) {
        for (int c = 0; c < HEAD; c++) {
            const int width = widths[c];
            used[c] = width > 0, count += used[c];
            step[c] = width ? steps[width - 1] : 1.0f, reciprocal[c] = 1 / step[c];
            most[c] = (1 << width) - 1, worth[c] = used[c] / distortion[width];
        }
    }

    // Codes and gain level of a token: the best of several gains close to the size of the token.
    float quantize(
        const float* x, const int64_t* tried, int64_t tries, float least, float octave, int unit, uint8_t* codes
    ) const {
        constexpr float ROUND = 3 << 22;  // adding and subtracting it rounds to integers
        Floats squares = {};
        for (int c = 0; c < HEAD; c += LANES) {
            const Floats own = load<Floats>(x + c);
            squares += own * own * load<Floats>(used + c);
        }
        const float size = std::sqrt(total(squares) / std::max(count, 1.0f));
        const float first = std::nearbyint(std::log2(std::max(size, least)) * octave);
        float best = INFINITY, level = 0, found[HEAD] = {};
        for (int64_t i = 0; i < tries; i++) {
            const float own = std::min(std::max(first + tried[i], (float)-unit), 255.0f - unit);
            const float gain = std::exp2(own / octave), inverse = 1 / gain;
            float code[HEAD];
            Floats error = {};
            for (int c = 0; c < HEAD; c += LANES) {
                const Floats value = load<Floats>(x + c), top = load<Floats>(most + c), middle = top * 0.5f;
                Floats at = value * load<Floats>(reciprocal + c) * inverse + middle;
                at = at < 0 ? Floats{} : at;
                at = at > top ? top : at;
                at = (at + ROUND) - ROUND;
                store(code + c, at);
                const Floats missing = (at - middle) * (load<Floats>(step + c) * gain) - value;
                error += missing * missing * load<Floats>(worth + c);
            }
            const float all = total(error);
            if (all < best) {
                best = all, level = own;
                std::copy(code, code + HEAD, found);
            }
        }
        for (int c = 0; c < HEAD; c++) codes[c] = (uint8_t)found[c];
        return level;
    }
};

}  // namespace

// units: [samples, heads, count * PAGE, HEAD]. high_mask: [samples, heads, count, PAGE / 8], bit masks of the
// high-precision tokens; not read without ranks. fields: [samples or 1, heads, NUM_FIELDS]; fitted is 1 if they are per
// sample. steps, distortion: by bit width. tried: offsets of gain levels. out: [samples, heads, count, PAGE_BYTES], or
// [samples, count, bytes] with SHARED, where each byte belongs to one head; zero.
extern "C" void kernel(
    const float* units, const uint8_t* high_mask, const Fields* fields, const float* steps, const float* distortion,
    const int64_t* tried, uint8_t* out, int64_t tries, int64_t samples, int64_t heads, int64_t count, int64_t fitted,
    int64_t unit, int64_t threads, float octave, float least
) {
    const Layouts layouts(fields, fitted ? samples : 1, heads);
    const int64_t parts = parts_of(count, threads);
#pragma omp parallel for collapse(2) num_threads(threads) if (threads > 1)
    for (int64_t i = 0; i < samples * heads; i++)
        for (int64_t part = 0; part < parts; part++) {
            const int64_t b = i / heads, head = i % heads;
            const Layout layout = layouts.of(fitted ? b : 0, head);
            const FieldsByRank of_head(fields + (fitted ? i : head) * PLACES_OF_HEAD);
            std::vector<Coordinates> coordinates;
            for (int rank = 0; rank <= LAST; rank++) coordinates.emplace_back(of_head.widths[rank], steps, distortion);
            uint8_t* pool = out + (SHARED ? b : i) * count * layout.bytes;
            for (int64_t n = part * count / parts; n < (part + 1) * count / parts; n++) {
                uint8_t* page = pool + n * layout.bytes;
                int32_t slots[PAGE + LANES] = {};
                if (LAST) {
                    const uint8_t* mask = high_mask + (i * count + n) * (PAGE / 8);
                    for (int row = 0; row < PAGE / 8; row++) page[layout.mask_at + row * layout.mask_row] = mask[row];
                }
                find_slots(page, layout, slots);
                for (int t = 0; t < PAGE; t++) {
                    const int rank = LAST && slots[t] >= RANKS[0].tokens, slot = slots[t] - first_token(rank);
                    const int tokens = RANKS[rank].tokens;
                    const Place place = layout[rank];
                    if (!place.pairs && !place.singles) continue;
                    const float* own_units = units + ((i * count + n) * PAGE + t) * HEAD;
                    uint8_t codes[HEAD];
                    const float level = coordinates[rank].quantize(own_units, tried, tries, least, octave, unit, codes);
                    page[place.gains_at + slot * place.gains_row] = (uint8_t)(level + unit);
                    const auto &pairs = of_head.pairs[rank], &singles = of_head.singles[rank];
                    const auto put_pair = [&](uint8_t& byte, int bit, int f) {
                        byte |= (codes[pairs[f].coordinate] >> pairs[f].shift & 3) << bit;
                    };
                    const auto put_single = [&](uint8_t& byte, int bit, int f) {
                        byte |= (codes[singles[f].coordinate] >> singles[f].shift & 1) << bit;
                    };
                    for_each_stored<2>(page, place.pairs_at, place.pairs_row, tokens, slot, place.pairs, put_pair);
                    for_each_stored<1>(page, place.singles_at, place.singles_row, tokens, slot, place.singles, put_single);
                }
            }
        }
}
