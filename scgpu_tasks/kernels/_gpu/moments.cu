// Sums over the cells for each gene. `order` lists the rows, those of one group together; a part
// is a run of that list, of one group, and gives each gene one partial sum, so that the order of
// all additions depends on the rows alone.

// A count of cells and a sum of values share a 32-bit word of shared memory: the native size of
// its atomic addition. 4095 rows of values up to 255 keep both below their limits.
#define COUNT_SHIFT 20
#define SMALL 255

// Blocks: parts by tiles of genes. One warp per row. odd[0] is set where a value is not a whole
// number from 0 to 2**31 - 1; the totals are worthless then.
extern "C" __global__ void __launch_bounds__(1024) gene_counts(
    const int64* indptr, const INDEX* indices, const VALUE* data, const int* order,
    const int* part_first, const int* part_stop, const int* part_slot, int n_genes, int tile,
    uint64* counts, uint64* totals, int* odd) {
    extern __shared__ uint32 packed[];
    const int low = blockIdx.y * tile;
    const int width = min(tile, n_genes - low);
    const int lane = threadIdx.x & 31;
    uint64* count = counts + (int64)part_slot[blockIdx.x] * n_genes + low;
    uint64* total = totals + (int64)part_slot[blockIdx.x] * n_genes + low;
    for (int i = threadIdx.x; i < width; i += blockDim.x) packed[i] = 0;
    __syncthreads();
    bool strange = false;
    const int stop = part_stop[blockIdx.x];
    for (int at = part_first[blockIdx.x] + (threadIdx.x >> 5); at < stop; at += blockDim.x >> 5) {
        const int row = order[at];
        const int64 last = indptr[row + 1];
        for (int64 base = indptr[row] + lane; base < last; base += 128) {
            VALUE value[4];
            INDEX column[4];
            #pragma unroll
            for (int a = 0; a < 4; a++) {
                const int64 k = base + 32 * a;
                value[a] = k < last ? data[k] : (VALUE)0;
                column[a] = k < last ? indices[k] : (INDEX)0;
            }
            #pragma unroll
            for (int a = 0; a < 4; a++) {
                const int64 c = (int64)column[a] - low;
                const double x = (double)value[a];
                if (x == 0.0 || c < 0 || c >= width) continue;
                const uint32 whole = x > 0.0 && x < 2147483648.0 ? (uint32)x : 0u;
                if ((double)whole != x) {
                    strange = true;
                    atomicAdd(count + c, 1ull);
                } else if (whole <= SMALL) {
                    atomicAdd(packed + c, (1u << COUNT_SHIFT) | whole);
                } else {
                    atomicAdd(count + c, 1ull);
                    atomicAdd(total + c, (uint64)whole);
                }
            }
        }
    }
    if (strange) odd[0] = 1;
    __syncthreads();
    for (int i = threadIdx.x; i < width; i += blockDim.x) {
        const uint32 word = packed[i];
        if (word == 0) continue;
        atomicAdd(count + i, (uint64)(word >> COUNT_SHIFT));
        atomicAdd(total + i, (uint64)(word & ((1u << COUNT_SHIFT) - 1u)));
    }
}

#define BATCH 256
#define AHEAD 2

__device__ __forceinline__ void prefetch(const void* address) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}

// Blocks: parts by tiles of genes. All threads of a block work on one row, then on the next: a
// column occurs once in a row, so plain additions to shared memory do not collide, and a gene's
// sum grows in the order of the rows.
extern "C" __global__ void __launch_bounds__(1024) gene_sums(
    const int64* indptr, const INDEX* indices, const VALUE* data, const int* order,
    const int* part_first, const int* part_stop, const int* part_group, const double* factor,
    const double* limit, int n_genes, int tile, int transform, double2* partial) {
    extern __shared__ double2 sums[];
    __shared__ int64 firsts[BATCH], lasts[BATCH];
    __shared__ double factors[BATCH];
    const int low = blockIdx.y * tile;
    const int width = min(tile, n_genes - low);
    const int stop = part_stop[blockIdx.x];
    const double* caps = limit + (int64)part_group[blockIdx.x] * n_genes + low;
    for (int i = threadIdx.x; i < width; i += blockDim.x) sums[i] = make_double2(0.0, 0.0);
    auto add = [&](INDEX column, VALUE value, double s) {
        const int64 c = (int64)column - low;
        if (c < 0 || c >= width) return;
        const double x = transformed((double)value, transform == CLIP ? caps[c] : s, transform);
        double2 sum = sums[c];
        sum.x += x;
        sum.y = fma(x, x, sum.y);
        sums[c] = sum;
    };
    for (int start = part_first[blockIdx.x]; start < stop; start += BATCH) {
        const int n = min(BATCH, stop - start);
        __syncthreads();
        for (int i = threadIdx.x; i < n; i += blockDim.x) {
            const int row = order[start + i];
            firsts[i] = indptr[row];
            lasts[i] = indptr[row + 1];
            factors[i] = transform == CLIP || transform == IDENTITY ? 1.0 : factor[row];
        }
        __syncthreads();
        VALUE value[AHEAD];
        INDEX column[AHEAD];
        // The head of the next row is on its way while this one is added up.
        auto fetch = [&](int i) {
            #pragma unroll
            for (int a = 0; a < AHEAD; a++) {
                const int64 k = firsts[i] + threadIdx.x + (int64)a * blockDim.x;
                const bool inside = k < lasts[i];
                value[a] = inside ? data[k] : (VALUE)0;
                column[a] = inside ? indices[k] : (INDEX)0;
            }
        };
        fetch(0);
        for (int i = 0; i < n; i++) {
            VALUE now[AHEAD];
            INDEX where[AHEAD];
            #pragma unroll
            for (int a = 0; a < AHEAD; a++) { now[a] = value[a]; where[a] = column[a]; }
            if (i + 1 < n) fetch(i + 1);
            if (i + 4 < n) {
                const char* values = (const char*)(data + firsts[i + 4]) + threadIdx.x * 128;
                const char* columns = (const char*)(indices + firsts[i + 4]) + threadIdx.x * 128;
                if (values < (const char*)(data + lasts[i + 4])) prefetch(values);
                if (columns < (const char*)(indices + lasts[i + 4])) prefetch(columns);
            }
            const int64 first = firsts[i] + threadIdx.x, last = lasts[i];
            #pragma unroll
            for (int a = 0; a < AHEAD; a++)
                if (first + (int64)a * blockDim.x < last) add(where[a], now[a], factors[i]);
            for (int64 k = first + (int64)AHEAD * blockDim.x; k < last; k += blockDim.x)
                add(indices[k], data[k], factors[i]);
            __syncthreads();
        }
    }
    double2* out = partial + (int64)blockIdx.x * n_genes + low;
    for (int i = threadIdx.x; i < width; i += blockDim.x) out[i] = sums[i];
}

// Blocks of 32 genes by 8 runs of parts, by groups: the parts of each group in a fixed order.
extern "C" __global__ void combine_parts(
    const double2* partial, const int* group_first, int n_genes, double2* out) {
    __shared__ double2 runs[8][32];
    const int gene = blockIdx.x * 32 + threadIdx.x;
    const int first = group_first[blockIdx.y], stop = group_first[blockIdx.y + 1];
    const int length = (stop - first + 7) / 8;
    const int begin = first + threadIdx.y * length;
    const int end = min(begin + length, stop);
    double2 sum = make_double2(0.0, 0.0);
    if (gene < n_genes) {
        #pragma unroll 4
        for (int part = begin; part < end; part++) {
            const double2 more = partial[(int64)part * n_genes + gene];
            sum.x += more.x;
            sum.y += more.y;
        }
    }
    runs[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y == 0 && gene < n_genes) {
        for (int run = 1; run < 8; run++) {
            sum.x += runs[run][threadIdx.x].x;
            sum.y += runs[run][threadIdx.x].y;
        }
        out[(int64)blockIdx.y * n_genes + gene] = sum;
    }
}
