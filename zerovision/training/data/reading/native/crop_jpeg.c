/* Decodes a part of a JPEG with libjpeg-turbo: only its rows and columns, at a reduced scale.
 *
 * What is left out is entropy-decoded (its bits have to be read), but neither transformed nor converted. The pixels are
 * those of a decode of the whole image with the library's defaults (accurate integer DCT, smooth upsampling of colour):
 * upsampling needs the neighbours, so a block more is decoded on the left and on the right, and cut off again. The
 * library itself sees to the rows above and below.
 *
 *     cc -O2 -shared -fPIC -o crop_jpeg.so crop_jpeg.c -ljpeg
 */

#include <setjmp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <jpeglib.h>

#define API_VERSION 1

enum { DONE = 0, NOT_FOR_ME = 1 };

struct error_manager {
    struct jpeg_error_mgr base;
    jmp_buf on_error;
};

static void leave(j_common_ptr info) { longjmp(((struct error_manager *)info->err)->on_error, 1); }

static void stay_silent(j_common_ptr info) { (void)info; }

static int is_readable(const struct jpeg_decompress_struct *info) {
    int colours = info->jpeg_color_space;
    return info->data_precision == 8 && !info->arith_code && (colours == JCS_YCbCr || colours == JCS_GRAYSCALE);
}

int crop_jpeg_version(void) { return API_VERSION; }

/* Decode rows top .. top+height-1 and columns left .. left+width-1 of the image at scale eighths/8.
 *
 * data, size: the file. out: height * width * 3 bytes, RGB. Returns DONE, or NOT_FOR_ME for anything unusual: damaged
 * data, a part that is not inside the image, colours that are neither grey nor YCbCr. out is undefined then.
 */
int crop_jpeg(const uint8_t *data, size_t size, int eighths, int top, int left, int height, int width, uint8_t *out) {
    struct jpeg_decompress_struct info;
    struct error_manager errors;
    uint8_t *volatile row = NULL;
    volatile int verdict = NOT_FOR_ME;

    memset(&info, 0, sizeof info);
    info.err = jpeg_std_error(&errors.base);
    errors.base.error_exit = leave;
    errors.base.output_message = stay_silent;
    if (setjmp(errors.on_error))
        goto end;
    jpeg_create_decompress(&info);
    jpeg_mem_src(&info, (unsigned char *)data, size);
    jpeg_read_header(&info, TRUE);
    if (!is_readable(&info))
        goto end;
    info.scale_num = eighths;
    info.scale_denom = 8;
    info.out_color_space = JCS_RGB;
    jpeg_calc_output_dimensions(&info);
    if (top < 0 || left < 0 || height < 1 || width < 1 || top > (int)info.output_height - height ||
        left > (int)info.output_width - width)
        goto end;
    jpeg_start_decompress(&info);

    int imcu_width = info.max_h_samp_factor * info.min_DCT_scaled_size;
    int first_column = left > imcu_width ? left - imcu_width : 0;
    int end_column = left + width + imcu_width;
    if (end_column > (int)info.output_width)
        end_column = info.output_width;
    JDIMENSION offset = first_column, columns = end_column - first_column;
    if (columns < info.output_width)
        jpeg_crop_scanline(&info, &offset, &columns);
    row = malloc((size_t)columns * 3);
    if (row == NULL)
        goto end;
    if (top > 0)
        jpeg_skip_scanlines(&info, top);
    JSAMPROW rows[1] = {row};
    while ((int)info.output_scanline < top + height) {
        uint8_t *target = out + (size_t)(info.output_scanline - top) * width * 3;
        if (jpeg_read_scanlines(&info, rows, 1) != 1)
            goto end;
        memcpy(target, row + (size_t)(left - (int)offset) * 3, (size_t)width * 3);
    }
    if (errors.base.num_warnings == 0)
        verdict = DONE;
end:
    free(row);
    jpeg_destroy_decompress(&info);
    return verdict;
}
