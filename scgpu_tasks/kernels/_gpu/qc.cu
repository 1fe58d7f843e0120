// Metrics of each cell.

#define SETS 4
#define AHEAD 4

// Lowers a number that many threads lower; nearly all find it low enough.
__device__ __forceinline__ void at_most(uint64* least, uint64 number) {
    if (number < *(volatile uint64*)least) atomicMin(least, number);
}

// One warp per row. Sets first_set .. first_set + n_sets - 1, SETS of them at most; `sums` is 0
// when only the sets are wanted. firsts[0] and firsts[1] become the first row with an invalid and
// with a fractional value.
extern "C" __global__ void cell_metrics(
    const int64* indptr, const INDEX* indices, const VALUE* data, int64 n_rows, int n_cols,
    const uint64* gene_sets, int first_set, int n_sets, int all_sets, int sums,
    int64* n_genes, double* total, double* set_totals, uint64* firsts) {
    extern __shared__ uint32 bits[];
    const int lane = threadIdx.x & 31;
    const uint64 wanted = ((1ull << n_sets) - 1ull) << first_set;
    if (n_sets > 0)
        column_bits(bits, n_cols, [=](int column) { return (gene_sets[column] & wanted) != 0; });
    for (int64 row = first_warp(); row < n_rows; row += all_warps()) {
        const int64 last = indptr[row + 1];
        double summed = 0.0, in_set[SETS] = {};
        int found = 0;
        bool invalid = false, fractional = false;
        for (int64 base = indptr[row] + lane; base < last; base += 32 * AHEAD) {
            VALUE value[AHEAD];
            INDEX column[AHEAD];
            #pragma unroll
            for (int a = 0; a < AHEAD; a++) {
                const int64 k = base + 32 * a;
                value[a] = k < last ? data[k] : (VALUE)0;
                column[a] = n_sets > 0 && k < last ? indices[k] : (INDEX)0;
            }
            #pragma unroll
            for (int a = 0; a < AHEAD; a++) {
                const double x = (double)value[a];
                summed += x;
                found += x != 0.0;
                invalid |= !(x >= 0.0 && x <= LARGEST_DOUBLE);
                fractional |= fabs(x - rint(x)) > 1e-6;
                if (n_sets > 0 && x != 0.0 && has_bit(bits, (int64)column[a])) {
                    const uint64 member = gene_sets[column[a]] >> first_set;
                    #pragma unroll
                    for (int s = 0; s < SETS; s++)
                        if (s < n_sets && (member >> s & 1ull)) in_set[s] += x;
                }
            }
        }
        if (sums) {
            // No vote: where the type of the values rules a flag out, NVRTC 13.0 moves a vote on it
            // to where lane 0 is alone, and every later exchange of the warp goes wrong.
            if (invalid) at_most(firsts, (uint64)row);
            if (fractional) at_most(firsts + 1, (uint64)row);
            __syncwarp();
            summed = warp_sum(summed);
            found = warp_count(found);
            if (lane == 0) {
                n_genes[row] = found;
                total[row] = summed;
            }
            __syncwarp();
        }
        for (int s = 0; s < n_sets; s++) {
            double x = 0.0;
            #pragma unroll
            for (int t = 0; t < SETS; t++) x = t == s ? in_set[t] : x;
            x = warp_sum(x);
            if (lane == 0) set_totals[row * all_sets + first_set + s] = x;
        }
    }
}

#define BINS 2048

// Doubles as integers of the same order.
__device__ __forceinline__ uint64 sortable(double x) {
    const int64 bits = __double_as_longlong(x);
    return bits < 0 ? ~(uint64)bits : (uint64)bits | 0x8000000000000000ull;
}

__device__ __forceinline__ double unsortable(uint64 key) {
    const uint64 bits = key >> 63 ? key & 0x7fffffffffffffffull : ~key;
    return __longlong_as_double((int64)bits);
}

// Largest first from a histogram of whole numbers below BINS; the block's first warp.
__device__ void top_by_count(
    const uint32* counted, int highest, const int* tops, int n_tops, double* out) {
    const int lane = threadIdx.x & 31;
    int64 taken = 0;
    double summed = 0.0;
    int at = 0;
    for (int head = highest; head >= 0 && at < n_tops; head -= 32) {
        const int number = head - lane;
        const int64 here = number >= 0 ? counted[number] : 0;
        int64 count = here;
        double sum = (double)here * number;
        for (int step = 1; step < 32; step <<= 1) {
            const int64 c = __shfl_up_sync(ALL_LANES, count, step);
            const double s = __shfl_up_sync(ALL_LANES, sum, step);
            if (lane >= step) { count += c; sum += s; }
        }
        while (at < n_tops) {
            const uint32 enough = __ballot_sync(ALL_LANES, taken + count >= tops[at]);
            if (enough == 0) break;
            if (lane == __ffs(enough) - 1)
                out[at] = summed + sum - (double)(taken + count - tops[at]) * number;
            at++;
        }
        taken += __shfl_sync(ALL_LANES, count, 31);
        summed += __shfl_sync(ALL_LANES, sum, 31);
    }
    for (; at < n_tops; at++)
        if (lane == 0) out[at] = summed;
}

// Key of the n-th largest value, by radix selection, and how many of its equals belong to the n
// largest; the whole block. `n` is at most the length of the row.
__device__ uint64 nth_largest(
    const VALUE* values, int64 length, int64 n, uint32* counted, int64* rest, uint64* shared_key) {
    uint64 key = 0;
    int64 left = n;
    for (int shift = 56; shift >= 0; shift -= 8) {
        for (int b = threadIdx.x; b < 256; b += blockDim.x) counted[b] = 0;
        __syncthreads();
        const uint64 above = shift == 56 ? 0 : ~0ull << (shift + 8);
        for (int64 k = threadIdx.x; k < length; k += blockDim.x) {
            const uint64 other = sortable((double)values[k]);
            if ((other & above) == (key & above)) atomicAdd(counted + (other >> shift & 255), 1u);
        }
        __syncthreads();
        if (threadIdx.x == 0) {
            int digit = 255;
            while (digit > 0 && (int64)counted[digit] < left) left -= counted[digit--];
            shared_key[0] = key | (uint64)digit << shift;
            rest[0] = left;
        }
        __syncthreads();
        key = shared_key[0];
        left = rest[0];
        __syncthreads();
    }
    return key;
}

// One block per row; `tops` rise.
extern "C" __global__ void top_totals(
    const int64* indptr, const VALUE* data, int64 n_rows, const int* tops, int n_tops,
    double* totals) {
    __shared__ uint32 counted[BINS];
    __shared__ int highest, misfit;
    __shared__ int64 rest;
    __shared__ uint64 shared_key;
    __shared__ double parts[32];
    const int lane = threadIdx.x & 31;
    for (int64 row = blockIdx.x; row < n_rows; row += gridDim.x) {
        const VALUE* values = data + indptr[row];
        const int64 length = indptr[row + 1] - indptr[row];
        double* out = totals + row * n_tops;
        for (int b = threadIdx.x; b < BINS; b += blockDim.x) counted[b] = 0;
        if (threadIdx.x == 0) { highest = 0; misfit = 0; }
        __syncthreads();
        int top = 0;
        // Whole warps take the same turns, so that all lanes meet in the ballot.
        for (int64 base = threadIdx.x - lane; base < length; base += blockDim.x) {
            const bool inside = base + lane < length;
            const double x = inside ? (double)values[base + lane] : 0.0;
            const bool fits = x >= 0.0 && x < BINS && x == floor(x);
            if (!fits) misfit = 1;
            // Most counts are 1: one addition for the warp instead of one for each lane.
            const uint32 ones = __ballot_sync(ALL_LANES, inside && x == 1.0);
            if (lane == 0 && ones) atomicAdd(counted + 1, (uint32)__popc(ones));
            if (inside && fits && x != 1.0) atomicAdd(counted + (int)x, 1u);
            if (inside && fits && (int)x > top) top = (int)x;
        }
        if (top > 0) atomicMax(&highest, top);
        __syncthreads();
        if (!misfit) {
            if (threadIdx.x < 32) top_by_count(counted, highest, tops, n_tops, out);
            __syncthreads();
            continue;
        }
        for (int t = 0; t < n_tops; t++) {
            const int64 n = tops[t] < length ? tops[t] : length;
            const uint64 key = nth_largest(values, length, n, counted, &rest, &shared_key);
            double sum = 0.0;
            for (int64 k = threadIdx.x; k < length; k += blockDim.x) {
                const double x = (double)values[k];
                if (sortable(x) > key) sum += x;
            }
            sum = warp_sum(sum);
            if (lane == 0) parts[threadIdx.x >> 5] = sum;
            __syncthreads();
            if (threadIdx.x == 0) {
                double whole = (double)rest * unsortable(key);
                for (int w = 0; w < blockDim.x >> 5; w++) whole += parts[w];
                out[t] = whole;
            }
            __syncthreads();
        }
    }
}
