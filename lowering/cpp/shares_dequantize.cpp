// Dequantizes pages that hold all heads (kvpass/codec/layer_pages.py). Needs shares_pages.h.
//
// pages: [samples, count, bytes]. basis: [samples or 1, heads, HEAD, BLOCK]. widths: [samples or 1, heads, ranks, HEAD].
// table: gains, then weights of fields. out: [samples, heads, count * PAGE, HEAD].
extern "C" void kernel(
    const uint8_t* pages, const float* basis, const uint8_t* widths, const float* table, float* out,
    int64_t samples, int64_t heads, int64_t count, int64_t fitted, int64_t threads
) {
    const Layouts layouts(widths, fitted ? samples : 1, heads);
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (threads > 1)
    for (int64_t i = 0; i < samples * heads; i++) {
        const int64_t head = i % heads, own = fitted ? i : head;
        const Layout layout = layouts.of(fitted ? i / heads : 0, head);
        const HeadFields fields(widths + own * PLACES_OF_HEAD);
        const float *rows = basis + own * HEAD * BLOCK, *weights = table + GAINS;
        float weight_of[LAST + 1][2][HEAD * 3];
        for (int rank = 0; rank <= LAST; rank++) {
            const uint8_t* own_widths = widths + own * PLACES_OF_HEAD + rank * HEAD;
            for (int kind = 0; kind < 2; kind++) {
                const auto& some = kind ? fields.singles[rank] : fields.pairs[rank];
                for (size_t f = 0; f < some.size(); f++)
                    weight_of[rank][kind][f] = weights[own_widths[some[f].coordinate] * 8 + some[f].shift];
            }
        }
        for (int64_t n = 0; n < count; n++) {
            const uint8_t* page = pages + (i / heads * count + n) * layout.bytes;
            int32_t slots[PAGE + LANES] = {};
            find_slots(page, layout, slots);
            for (int t = 0; t < PAGE; t++) {
                const int rank = LAST && slots[t] >= RANKS[0].tokens, slot = slots[t] - first_token(rank);
                const Place& place = layout[rank];
                const int tokens = RANKS[rank].tokens;
                float units[HEAD] = {};
                const auto &pairs = fields.pairs[rank], &singles = fields.singles[rank];
                const float *of_pairs = weight_of[rank][0], *of_singles = weight_of[rank][1];
                const auto add_pair = [&](uint8_t byte, int bit, int f) {
                    units[pairs[f].coordinate] += ((byte >> bit & 3) - PAIR) * of_pairs[f];
                };
                const auto add_single = [&](uint8_t byte, int bit, int f) {
                    units[singles[f].coordinate] += ((byte >> bit & 1) - SINGLE) * of_singles[f];
                };
                for_each_stored<2>(page, place.pairs_at, place.pairs_row, tokens, slot, place.pairs, add_pair);
                for_each_stored<1>(page, place.singles_at, place.singles_row, tokens, slot, place.singles, add_single);
                const bool stored = place.pairs || place.singles;
                const float gain = stored ? table[page[place.gains_at + slot * place.gains_row]] : 0;
                float* to = out + ((i * count + n) * PAGE + t) * HEAD;
                for (int block = 0; block < HEAD; block += BLOCK) {
                    float sum[BLOCK] = {};
                    for (int c = 0; c < BLOCK; c++) {
                        const float unit = units[block + c] * gain, *row = rows + (block + c) * BLOCK;
                        for (int d = 0; d < BLOCK; d++) sum[d] += unit * row[d];
                    }
                    std::copy(sum, sum + BLOCK, to + block);
                }
            }
        }
    }
}
